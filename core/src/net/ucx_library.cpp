// Finds and loads UCX.
#include <dlfcn.h>
#include <signal.h>

#include <cstdlib>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "base/environment.h"
#include "net/ucx.h"
#include "net/ucx_api.h"

namespace phx {
namespace ucx {
namespace {

constexpr const char *kFile = "libucp.so.0";

std::string directory_of(const std::string &path) { return path.substr(0, path.rfind('/') + 1); }

// The file that holds a function, by its real path.
std::string file_of(const void *function) {
  Dl_info info{};
  if (dladdr(function, &info) == 0 || info.dli_fname == nullptr) return {};
  const std::unique_ptr<char, void (*)(void *)> real(realpath(info.dli_fname, nullptr), &std::free);
  return real != nullptr ? real.get() : info.dli_fname;
}

// UCX installs handlers of signals while it is loaded: of faults, to print a backtrace, and of SIGHUP. A library must
// leave those of the application alone, so the former ones are put back.
class KeptSignalHandlers {
 public:
  KeptSignalHandlers() {
    for (int number = 1; number < kSignals; ++number)
      known_[number] = sigaction(number, nullptr, &before_[number]) == 0;
  }
  ~KeptSignalHandlers() {
    for (int number = 1; number < kSignals; ++number) {
      struct sigaction now {};
      if (!known_[number] || sigaction(number, nullptr, &now) != 0) continue;
      const void *const handler = reinterpret_cast<void *>(now.sa_handler);
      if (now.sa_handler == before_[number].sa_handler || now.sa_handler == SIG_DFL || now.sa_handler == SIG_IGN)
        continue;
      if (file_of(handler).find("/libucs") != std::string::npos) sigaction(number, &before_[number], nullptr);
    }
  }
  KeptSignalHandlers(const KeptSignalHandlers &) = delete;
  KeptSignalHandlers &operator=(const KeptSignalHandlers &) = delete;

 private:
  static constexpr int kSignals = 32;  // those that are not real-time
  struct sigaction before_[kSignals] {};
  bool known_[kSignals] = {};
};

// Loads one candidate. Returns what is wrong with it; empty: nothing.
std::string load(const std::string &name, Library *out) {
  const KeptSignalHandlers kept;
  if (name.find('/') != std::string::npos) {
    // Those that it needs come from the same directory, whatever the search path is. One that is missing there is
    // found, or reported, by the loader.
    for (const char *sibling : {"libucm.so.0", "libucs.so.0", "libuct.so.0"})
      (void)dlopen((directory_of(name) + sibling).c_str(), RTLD_NOW | RTLD_LOCAL);
  }
  void *const handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char *const reason = dlerror();
    return reason != nullptr ? reason : name + " cannot be loaded";
  }
  Api &api = out->api;
  // NOLINTBEGIN(bugprone-macro-parentheses): a list of parameters, and names
#define PHX_UCX_LOAD(member, result, symbol, parameters)                       \
  api.member = reinterpret_cast<result(*) parameters>(dlsym(handle, #symbol)); \
  if (api.member == nullptr) return name + " has no " #symbol "; UCX 1.13 or later is needed";
  PHX_UCX_FUNCTIONS(PHX_UCX_LOAD)
#undef PHX_UCX_LOAD
  // NOLINTEND(bugprone-macro-parentheses)
  api.get_version(&out->major, &out->minor, &out->release);
  out->path = file_of(reinterpret_cast<void *>(api.get_version));
  if (out->major != kMajor || out->minor < kMinor)
    return out->path + " is UCX " + std::to_string(out->major) + "." + std::to_string(out->minor) +
           "; 1.13 or a later 1.x is needed";
  const std::string services = file_of(reinterpret_cast<void *>(api.status_text));
  if (directory_of(services) != directory_of(out->path))
    return out->path + " works with its own libucs.so.0, but the process has loaded " + services;
  return {};
}

struct Found {
  std::mutex mutex;
  std::string hint;
  bool tried = false;  // with this hint
  std::unique_ptr<const Library> library;
  std::string problem;
};
Found &found() {
  static Found *const only = new Found;  // never destroyed: UCX stays loaded
  return *only;
}

std::string try_all(const std::string &hint, std::unique_ptr<const Library> *out) {
  const char *const chosen = read_variable<variable("PHALANX_UCX")>();
  std::vector<std::string> candidates;
  if (chosen != nullptr && *chosen != '\0') {
    candidates.emplace_back(chosen);
  } else {
    candidates.emplace_back(kFile);
    if (!hint.empty()) candidates.push_back(hint + "/" + kFile);
  }
  std::string problem;
  for (const std::string &candidate : candidates) {
    auto library = std::make_unique<Library>();
    const std::string reason = load(candidate, library.get());
    if (reason.empty()) {
      *out = std::move(library);
      return {};
    }
    problem += (problem.empty() ? "" : "; ") + reason;
  }
  return "there is no usable UCX: " + problem + ". " +
         (chosen != nullptr && *chosen != '\0'
              ? "PHALANX_UCX must be the path of a libucp.so.0 of UCX 1.13 or later"
              : "Install it by `apt install libucx0` or `pip install libucx-cu12`, or set PHALANX_UCX to the path of "
                "its libucp.so.0");
}

}  // namespace

const Library *find_library(std::string *problem) {
  Found &self = found();
  const std::lock_guard<std::mutex> lock(self.mutex);
  if (self.library == nullptr && !self.tried) {
    self.problem = try_all(self.hint, &self.library);
    self.tried = true;
  }
  *problem = self.problem;
  return self.library.get();
}

}  // namespace ucx

void set_ucx_hint(const char *path) {
  ucx::Found &self = ucx::found();
  const std::lock_guard<std::mutex> lock(self.mutex);
  const std::string hint = path != nullptr ? path : "";
  if (hint == self.hint) return;
  self.hint = hint;
  self.tried = false;
}

}  // namespace phx
