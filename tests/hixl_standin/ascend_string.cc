// SPDX-License-Identifier: Apache-2.0
// Stand-in for libmetadef.so, a test double: only the string that the interface passes about.
#include "hixl_api.h"

namespace ge
{
AscendString::AscendString(const char *text) : text_(text ? std::make_shared<std::string>(text) : nullptr)
{
}

AscendString::AscendString(const char *text, size_t length)
    : text_(text ? std::make_shared<std::string>(text, length) : nullptr)
{
}

const char *AscendString::GetString() const
{
    return text_ ? text_->c_str() : "";
}

size_t AscendString::GetLength() const
{
    return text_ ? text_->size() : 0;
}

bool AscendString::operator<(const AscendString &other) const
{
    if (!text_ || !other.text_)
        return !text_ && other.text_;
    return *text_ < *other.text_;
}
} // namespace ge
