// SPDX-License-Identifier: Apache-2.0
// Stand-in, a test double: as much JSON as the options need. Escapes keep the character after the backslash.
#include "json.h"

#include <cstring>

namespace standin
{
namespace
{
class Parser
{
  public:
    explicit Parser(const std::string &text) : at_(text.c_str()), end_(at_ + text.size())
    {
    }

    bool document(Json *value)
    {
        return parse(value, 0) && (skip(), at_ == end_);
    }

  private:
    void skip()
    {
        while (at_ < end_ && std::strchr(" \t\r\n", *at_) && *at_)
            at_++;
    }

    bool eat(char wanted)
    {
        skip();
        if (at_ == end_ || *at_ != wanted)
            return false;
        at_++;
        return true;
    }

    bool parse(Json *value, int depth)
    {
        skip();
        if (at_ == end_ || depth > 32)
            return false;
        if (*at_ == '{')
            return object(value, depth);
        if (*at_ == '[')
            return list(value, depth);
        if (*at_ == '"') {
            value->kind = Json::TEXT;
            return string(&value->text);
        }
        return bare(value);
    }

    bool string(std::string *text)
    {
        if (!eat('"'))
            return false;
        while (at_ < end_ && *at_ != '"') {
            if (*at_ == '\\' && ++at_ == end_)
                return false;
            text->push_back(*at_++);
        }
        return eat('"');
    }

    bool bare(Json *value)
    {
        while (at_ < end_ && *at_ && std::strchr("+-.0123456789eEtrufalsn", *at_))
            value->text.push_back(*at_++);
        const std::string &text = value->text;
        value->kind = text == "true" || text == "false" || text == "null" ? Json::NOTHING : Json::NUMBER;
        return value->kind == Json::NOTHING || text.find_first_of("0123456789") != std::string::npos;
    }

    bool list(Json *value, int depth)
    {
        value->kind = Json::LIST;
        if (!eat('['))
            return false;
        if (eat(']'))
            return true;
        do {
            value->items.emplace_back();
            if (!parse(&value->items.back(), depth + 1))
                return false;
        } while (eat(','));
        return eat(']');
    }

    bool object(Json *value, int depth)
    {
        value->kind = Json::OBJECT;
        if (!eat('{'))
            return false;
        if (eat('}'))
            return true;
        do {
            value->members.emplace_back();
            auto &[key, held] = value->members.back();
            if (!string(&key) || !eat(':') || !parse(&held, depth + 1))
                return false;
        } while (eat(','));
        return eat('}');
    }

    const char *at_;
    const char *end_;
};
} // namespace

const Json *Json::get(const std::string &key) const
{
    for (const auto &[name, value] : members)
        if (name == key)
            return &value;
    return nullptr;
}

bool parse_json(const std::string &text, Json *value)
{
    return Parser(text).document(value);
}
} // namespace standin
