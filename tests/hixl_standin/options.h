// SPDX-License-Identifier: Apache-2.0
// Stand-in, a test double: Initialize's options, their ranges, and which of the three engines they choose.
#ifndef HIXL_STANDIN_OPTIONS_H
#define HIXL_STANDIN_OPTIONS_H

#include <map>
#include <string>

#include "hixl_api.h"
#include "knobs.h"

namespace standin
{
using hixl::Status;

struct Settings {
    Flavour flavour = FLAVOUR_HIXL;
    Placement placement = PLACEMENT_DEVICE;
    bool auto_connect = false;
    int pool_threads = 2;
    int pool_capacity = 128;
};

// PARAM_INVALID, and `why` says which option and what is wrong with it.
Status parse_options(const std::map<std::string, std::string> &options, Settings *settings, std::string *why);
} // namespace standin

#endif
