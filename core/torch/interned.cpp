// The table of texts. It only grows, by the names of groups and reductions that were ever sent to torch.distributed.
#include "interned.h"

#include <deque>
#include <mutex>
#include <string>
#include <unordered_map>

#include "base/fork.h"
#include "phalanx_torch.h"

namespace phxt {
namespace {

struct Texts {  // never destroyed: an op may run while the process exits
  phx::AcrossForks<std::mutex> mutex;
  std::deque<std::string> by_number;  // does not move its elements, which the map and phxt_text point to
  std::unordered_map<std::string_view, int64_t> numbers;
};
Texts &texts() {
  static Texts *const made = new Texts;
  return *made;
}

}  // namespace

int64_t intern(std::string_view text) {
  Texts &all = texts();
  const std::lock_guard lock(all.mutex);
  if (const auto found = all.numbers.find(text); found != all.numbers.end()) return found->second;
  const auto number = static_cast<int64_t>(all.by_number.size());
  all.numbers.emplace(all.by_number.emplace_back(text), number);
  return number;
}

}  // namespace phxt

extern "C" const char *phxt_text(int64_t number) {
  phxt::Texts &all = phxt::texts();
  const std::lock_guard lock(all.mutex);
  return number < 0 || static_cast<size_t>(number) >= all.by_number.size()
             ? nullptr
             : all.by_number[static_cast<size_t>(number)].c_str();
}
