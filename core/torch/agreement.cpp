#include "agreement.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace phxt {
namespace {

struct Header {  // what every rank says of its call
  uint64_t hash, length, bytes, bytes_before;
};

uint64_t hash_of(std::string_view text) {  // FNV-1a
  uint64_t hash = UINT64_C(0xcbf29ce484222325);
  for (const char each : text) hash = (hash ^ static_cast<unsigned char>(each)) * UINT64_C(0x100000001b3);
  return hash;
}

template <class Element>
std::vector<Element> gather(const Call &call, const Element *mine, size_t count, int32_t dtype, size_t elements,
                            bool of_graph = true) {
  std::vector<Element> all(count * static_cast<size_t>(call.group->size));
  phx_options options = PHX_OPTIONS_INIT;
  options.flags = of_graph ? PHX_OPTION_COMPARES_GRAPHS : 0;
  check_core(phx_all_gather(call.handle(), mine, all.data(), elements, dtype, &options, nullptr));
  return all;
}

// "4096 bytes on group ranks 0, 2; 8192 bytes on group rank 1".
std::string tell_apart(const std::vector<std::string> &told) {
  std::string text;
  std::vector<bool> done(told.size(), false);
  for (size_t i = 0; i < told.size(); ++i) {
    if (done[i]) continue;
    std::string ranks;
    for (size_t j = i; j < told.size(); ++j) {
      if (told[j] != told[i]) continue;
      done[j] = true;
      ranks += (ranks.empty() ? "" : ", ") + std::to_string(j);
    }
    const bool several = ranks.find(',') != std::string::npos;
    text += (text.empty() ? "" : "; ") + told[i] + (several ? " on group ranks " : " on group rank ") + ranks;
  }
  return text;
}

template <class Element, class Tell>
std::string tell_apart(const std::vector<Element> &all, Tell tell) {
  std::vector<std::string> told;
  told.reserve(all.size());
  for (const Element &each : all) told.push_back(tell(each));
  return tell_apart(told);
}

bool all_equal(const std::vector<std::string_view> &all) {
  return std::adjacent_find(all.begin(), all.end(), std::not_equal_to<>()) == all.end();
}

// A part of a plan as a message shows it.
std::string quoted(std::string_view part) {
  constexpr size_t kShown = 200;
  return "'" + std::string(part.substr(0, kShown)) + (part.size() > kShown ? "...'" : "'");
}

// Takes the first part off a text. False where there is none left.
bool take_part(std::string_view &text, std::string_view &part) {
  if (text.empty()) return false;
  part = name_of_plan(text);
  text.remove_prefix(std::min(text.size(), part.size() + 1));
  return true;
}

// "Collective 2 is the first that differs: ...". The name does not count, as it differs wherever another part does.
std::string first_difference(std::vector<std::string_view> texts) {
  for (std::string_view &text : texts) text.remove_prefix(std::min(text.size(), name_of_plan(text).size() + 1));
  for (size_t number = 1;; ++number) {
    std::vector<std::string> told;
    size_t ended = 0;
    for (std::string_view &text : texts) {
      std::string_view part;
      const bool has_one = take_part(text, part);
      ended += has_one ? 0 : 1;
      told.push_back(has_one ? quoted(part) : "no collective");
    }
    if (ended == texts.size()) return "";
    if (std::adjacent_find(told.begin(), told.end(), std::not_equal_to<>()) != told.end())
      return " Collective " + std::to_string(number) + " is the first that differs: " + tell_apart(told) + ".";
  }
}

[[noreturn]] void plans_differ(const Call &call, std::string_view plan, const std::vector<Header> &headers) {
  size_t longest = 1;
  for (const Header &header : headers) longest = std::max<size_t>(longest, header.length);
  longest = std::min(longest, kComparedBytes);
  std::string mine(longest, '\0');
  std::memcpy(mine.data(), plan.data(), std::min(plan.size(), longest));
  const std::vector<char> all = gather(call, mine.data(), longest, PHX_DTYPE_U8, longest);
  std::vector<std::string_view> texts;
  for (size_t i = 0; i < headers.size(); ++i)
    texts.emplace_back(all.data() + i * longest, std::min<size_t>(headers[i].length, longest));
  std::string where = first_difference(texts);
  if (where.empty() && all_equal(texts))
    where = " They differ after the first " + std::to_string(kComparedBytes >> 10) + " KiB.";
  call.fail(PHX_ERR_MISMATCH,
            "the ranks compiled different graphs: " +
                tell_apart(texts, [](std::string_view text) { return "plan " + quoted(name_of_plan(text)); }) + "." +
                where + " Every rank must compile the same model for inputs of the same shapes.");
}

std::string tell_bytes(const Header &header) {
  std::string text = std::to_string(header.bytes) + " bytes";
  if (header.bytes_before != 0) text += " (instead of the " + std::to_string(header.bytes_before) + " it has)";
  return text;
}

}  // namespace

void agree_on_plan(const Call &call, std::string_view plan, uint64_t bytes, uint64_t bytes_before, bool of_graph) {
  if (call.group->size == 1) return;
  const Header mine{hash_of(plan), plan.size(), bytes, bytes_before};
  const std::vector<Header> all = gather(call, &mine, 1, PHX_DTYPE_U64, sizeof mine / sizeof(uint64_t), of_graph);
  for (const Header &each : all)
    if (each.hash != mine.hash || each.length != mine.length) plans_differ(call, plan, all);
  for (const Header &each : all)
    if (each.bytes != bytes || each.bytes_before != bytes_before)
      call.fail(PHX_ERR_MISMATCH, "the ranks ask for different sizes of plan " + quoted(name_of_plan(plan)) + ": " +
                                      tell_apart(all, tell_bytes) +
                                      ". Every rank must run it with inputs of the same shapes.");
}

}  // namespace phxt
