// SPDX-License-Identifier: Apache-2.0
// Stand-in, a test double: Initialize's options.
#include "options.h"

#include <cstdlib>
#include <cstring>

#include "json.h"

namespace standin
{
namespace
{
bool whole(const std::string &text, long low, long high, long *value)
{
    if (text.empty() || text.size() > 9 || text.find_first_not_of("0123456789") != std::string::npos)
        return false;
    *value = std::strtol(text.c_str(), nullptr, 10);
    return *value >= low && *value <= high;
}

bool flag(const std::string &text, bool *value)
{
    *value = text == "1";
    return text == "0" || text == "1";
}

// "NUM:SIZE_MB"
bool pool(const std::string &text, bool *none)
{
    const size_t colon = text.find(':');
    long count, size;
    if (colon == std::string::npos || !whole(text.substr(0, colon), 0, 1 << 20, &count) ||
        !whole(text.substr(colon + 1), 0, 1 << 20, &size))
        return false;
    *none = !count && !size;
    return true;
}

bool one_of(const Json *value, std::initializer_list<const char *> allowed)
{
    for (const char *one : allowed)
        if (value && value->kind == Json::TEXT && value->text == one)
            return true;
    return false;
}

struct Resources {
    bool given = false, version_1_3 = false, placed = false;
    Placement placement = PLACEMENT_DEVICE;
};

bool communication_resources(const std::string &text, Resources *found)
{
    Json root;
    if (text.empty())
        return true;
    if (!parse_json(text, &root) || root.kind != Json::OBJECT)
        return false;
    found->given = true;
    const Json *const version = root.get("version"), *const endpoints = root.get("endpoint_list");
    found->version_1_3 = version && version->text == "1.3";
    if (!found->version_1_3)
        return true;
    if (!endpoints) // the version alone picks the engine, which then finds its endpoints by itself
        return true;
    if (endpoints->kind != Json::LIST || endpoints->items.empty())
        return false;
    for (const Json &one : endpoints->items) {
        const Json *const id = one.get("comm_id"), *const placement = one.get("placement");
        if (!one_of(one.get("protocol"), {"roce", "ub_ctp", "uboe", "ub_rtp", "hccs"}) || !id || id->text.empty())
            return false;
        if (placement && !one_of(placement, {"host", "device"}))
            return false;
        if (placement && !found->placed) {
            found->placed = true;
            found->placement = placement->text == "host" ? PLACEMENT_HOST : PLACEMENT_DEVICE;
        }
    }
    return true;
}

// A member may be nested ("a": {"b": 1}) or dotted ("a.b": 1), its number bare or in quotes.
const Json *member(const Json &root, const char *group, const char *name)
{
    if (const Json *dotted = root.get(std::string(group) + "." + name))
        return dotted;
    const Json *const nested = root.get(group);
    return nested ? nested->get(name) : nullptr;
}

bool global_resources(const std::string &text, Settings *settings, bool *protocol)
{
    static const struct {
        const char *group, *name;
        long low, high;
    } ranges[] = {
        {"fabric_memory", "max_capacity", 1, 1024},
        {"fabric_memory", "task_stream_num", 1, 8},
        {"connect_pool", "thread_num", 1, 64},
        {"connect_pool", "task_queue_capacity", 1, 65535},
        {"comm_resource_config", "listen_port", 1, 65535},
        {"comm_resource_config", "qos", 0, 7},
        {"comm_resource_config", "max_active_channels", 1, 1 << 20},
    };
    Json root;
    if (text.empty())
        return true;
    if (!parse_json(text, &root) || root.kind != Json::OBJECT)
        return false;
    for (const auto &range : ranges) {
        const Json *const found = member(root, range.group, range.name);
        long value;
        if (!found)
            continue;
        if (!whole(found->text, range.low, range.high, &value))
            return false;
        if (!std::strcmp(range.name, "thread_num"))
            settings->pool_threads = static_cast<int>(value);
        if (!std::strcmp(range.name, "task_queue_capacity"))
            settings->pool_capacity = static_cast<int>(value);
    }
    *protocol = member(root, "comm_resource_config", "protocol_desc") != nullptr;
    return true;
}
} // namespace

Status parse_options(const std::map<std::string, std::string> &options, Settings *settings, std::string *why)
{
    bool fabric = false, pool_given = false, pool_none = false, protocol = false;
    Resources resources;
    for (const auto &[key, text] : options) {
        long value = 0;
        bool right = false;
        if (key == "EnableUseFabricMem")
            right = flag(text, &fabric);
        else if (key == "BufferPool")
            right = pool_given = pool(text, &pool_none);
        else if (key == "RdmaTrafficClass")
            right = whole(text, 0, 255, &value) && value % 4 == 0;
        else if (key == "RdmaServiceLevel")
            right = whole(text, 0, 7, &value);
        else if (key == "LocalCommRes")
            right = communication_resources(text, &resources);
        else if (key == "AutoConnect")
            right = flag(text, &settings->auto_connect);
        else if (key == "GlobalResourceConfig")
            right = global_resources(text, settings, &protocol);
        if (!right) {
            *why = "option " + key + ": unknown, or its value is refused: " + text;
            return hixl::PARAM_INVALID;
        }
    }

    char soc[64];
    hixl_standin_text(TEXT_SOC, soc, sizeof soc);
    settings->flavour = static_cast<Flavour>(hixl_standin_knob(KNOB_FLAVOUR));
    if (fabric)
        settings->flavour = FLAVOUR_FABRIC;
    else if (resources.given)
        settings->flavour = resources.version_1_3 ? FLAVOUR_HIXL : FLAVOUR_COMM;
    else if (protocol || !std::strncmp(soc, "Ascend950", 9))
        settings->flavour = FLAVOUR_HIXL;

    if (settings->flavour == FLAVOUR_HIXL)
        settings->placement =
            resources.placed ? resources.placement : static_cast<Placement>(hixl_standin_knob(KNOB_PLACEMENT));
    if (settings->flavour != FLAVOUR_COMM && pool_given && !pool_none) {
        *why = "option BufferPool: this engine takes only 0:0";
        return hixl::PARAM_INVALID;
    }
    return hixl::SUCCESS;
}
} // namespace standin
