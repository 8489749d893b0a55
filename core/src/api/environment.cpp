// The table of environment variables for callers, and the warnings about variables that are wrong.
#include "base/environment.h"

#include <atomic>
#include <string>

#include "api/entry.h"
#include "base/tuning.h"
#include "group/dump.h"
#include "kernels/kernels.h"
#include "phalanx/tuning.h"

namespace phx {

void warn_about_environment() {
  static std::atomic<bool> warned{false};
  if (!logs(PHX_LOG_WARNING) || warned.exchange(true)) return;
  for (const std::string &problem : {kernels::isa_problem(), tuning_problem(), dump_problem(), wait_warning_problem()})
    if (!problem.empty()) PHX_LOG(PHX_LOG_WARNING, "%s", problem.c_str());
  const std::string unknown = unknown_variables();
  if (!unknown.empty())
    PHX_LOG(PHX_LOG_WARNING,
            "environment variables that Phalanx does not know, and ignores: %s. docs/reference/environment lists all.",
            unknown.c_str());
}

}  // namespace phx

extern "C" {

const char *phx_environment(void) {
  static const std::string *const table = new std::string([] {
    std::string text;
    for (const phx::Variable &row : phx::kVariables)
      text += std::string(row.name) + '\t' + row.reader + '\t' + row.values + '\t' + row.fallback + '\t' + row.meaning +
              '\n';
    return text;
  }());  // never destroyed: it may be read during exit
  return table->c_str();
}
}
