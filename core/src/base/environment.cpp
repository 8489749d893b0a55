#include "base/environment.h"

#include <algorithm>
#include <vector>

extern char **environ;

namespace phx {
namespace {

constexpr std::string_view kPrefix = "PHALANX_";

bool begins_with(std::string_view text, std::string_view begin) { return text.substr(0, begin.size()) == begin; }

// How many letters to insert, remove or replace to make `b` of `a`.
size_t edits_between(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t above = row[j];
      row[j] = std::min({above + 1, row[j - 1] + 1, diagonal + (a[i - 1] == b[j - 1] ? 0 : 1)});
      diagonal = above;
    }
  }
  return row[b.size()];
}

std::string closest_to(std::string_view name) {
  constexpr size_t kMostEdits = 3;
  const Variable *best = nullptr;
  size_t least = kMostEdits + 1;
  for (const Variable &row : kVariables) {
    if (row.reader == kInternal) continue;
    const size_t edits = edits_between(name, row.name);
    if (edits >= least) continue;
    least = edits;
    best = &row;
  }
  return best == nullptr ? "" : std::string(" (did you mean ") + best->name + "?)";
}

// Negative: not a number of seconds.
double wait_warning_s() {
  const char *const text = read_variable<variable("PHALANX_WAIT_WARNING_S")>();
  if (text == nullptr || *text == '\0') return 10;
  char *end = nullptr;
  const double seconds = std::strtod(text, &end);
  return *end == '\0' && seconds >= 0 && seconds <= 1e6 ? seconds : -1;
}

}  // namespace

std::string unknown_variables() {
  std::string all;
  for (char **entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string_view whole(*entry);
    const std::string_view name = whole.substr(0, whole.find('='));
    if (!begins_with(name, kPrefix) || variable(name) < kVariableCount) continue;
    // Kubernetes sets these in every pod for a service that is called phalanx.
    const std::string_view rest = name.substr(kPrefix.size());
    if (begins_with(rest, "SERVICE_") || begins_with(rest, "PORT")) continue;
    all += (all.empty() ? "" : ", ") + std::string(name) + closest_to(name);
  }
  return all;
}

int64_t wait_warning_ns() {
  static const double seconds = wait_warning_s();
  return static_cast<int64_t>((seconds < 0 ? 10 : seconds) * 1e9);
}

std::string wait_warning_problem() {
  if (wait_warning_s() >= 0) return "";
  return std::string("PHALANX_WAIT_WARNING_S is '") + read_variable<variable("PHALANX_WAIT_WARNING_S")>() +
         "'; expected a number of seconds from 0 to 1000000. 10 is used.";
}

}  // namespace phx
