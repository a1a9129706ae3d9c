// Included before every source: gives std::format to C++20 libraries that lack it (GCC before 13). mlx-c formats
// error messages with plain "{}" fields only, and that is all this understands.
#pragma once

#include <version>

#if __has_include(<format>)
#include <format>
#endif

#ifndef __cpp_lib_format
#include <sstream>
#include <string>
#include <string_view>

namespace std {
template <typename... Args>
string format(string_view text, const Args&... args) {
  ostringstream out;
  auto field = [&](const auto& value) {
    auto at = text.find("{}");
    out << text.substr(0, at);
    if (at != string_view::npos) {
      out << value;
      text.remove_prefix(at + 2);
    } else {
      text = {};
    }
  };
  (field(args), ...);
  out << text;
  return out.str();
}
} // namespace std
#endif
