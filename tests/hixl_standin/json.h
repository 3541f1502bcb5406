// SPDX-License-Identifier: Apache-2.0
// Stand-in, a test double: as much JSON as the options need.
#ifndef HIXL_STANDIN_JSON_H
#define HIXL_STANDIN_JSON_H

#include <string>
#include <utility>
#include <vector>

namespace standin
{
struct Json {
    enum Kind { NOTHING, TEXT, NUMBER, LIST, OBJECT } kind = NOTHING;
    std::string text; // also a number's or literal's spelling
    std::vector<Json> items;
    std::vector<std::pair<std::string, Json>> members;

    const Json *get(const std::string &key) const;
};

bool parse_json(const std::string &text, Json *value);
} // namespace standin

#endif
