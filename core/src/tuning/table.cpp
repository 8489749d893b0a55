// The table: a text file with one row for each host and group size,
//
//   host=1f3a... ranks=2 cores=2 one_shot_bytes=512 chunk_bytes=131072 ...
//
// Keys that are not known are passed over, so that an older library reads a newer table.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <sstream>

#include "base/fd.h"
#include "tuning/tuning.h"
#include "world/identity.h"

namespace phx {
namespace {

constexpr size_t kMostBytes = size_t{1} << 20;
constexpr const char *kSave = "group_save_tuning";

using Row = std::map<std::string, std::string>;

std::string read_all(int fd) {
  std::string text;
  char buffer[4096];
  for (;;) {
    const ssize_t got = read(fd, buffer, sizeof buffer);
    if (got <= 0 || text.size() > kMostBytes) return text;
    text.append(buffer, static_cast<size_t>(got));
  }
}

// Which host a row is for: a home directory may be shared by several. Its name and its processor.
std::string host_key() {
  char name[256] = {};
  gethostname(name, sizeof name - 1);
  std::string facts = name;
  if (Fd fd(open("/proc/cpuinfo", O_RDONLY | O_CLOEXEC)); fd.valid()) {
    const std::string text = read_all(fd.get());
    const size_t at = text.find("model name");
    if (at != std::string::npos) facts += text.substr(at, text.find('\n', at) - at);
  }
  char key[17];
  std::snprintf(key, sizeof key, "%016" PRIx64, hash_bytes(facts.data(), facts.size()));
  return key;
}

Row parse(const std::string &line) {
  Row row;
  std::istringstream words(line);
  for (std::string word; words >> word;) {
    const size_t equals = word.find('=');
    if (equals != std::string::npos) row[word.substr(0, equals)] = word.substr(equals + 1);
  }
  return row;
}

bool is_for(const Row &row, const std::string &host, int group_size) {
  const auto of = [&](const char *key) {
    const auto found = row.find(key);
    return found == row.end() ? std::string() : found->second;
  };
  return of("host") == host && of("ranks") == std::to_string(group_size);
}

// Digits and nothing else: strtoull would read "-1" as well, as 2^64 - 1.
void take(const Row &row, const char *key, uint64_t *value) {
  const auto found = row.find(key);
  if (found == row.end()) return;
  const char *end = found->second.data() + found->second.size();
  uint64_t number = 0;
  const auto parsed = std::from_chars(found->second.data(), end, number);
  if (parsed.ec == std::errc() && parsed.ptr == end && number != 0) *value = number;
}

// Only a file of this user: another one's could not do harm, but slow us down.
std::string read_table(const std::string &path) {
  Fd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat info;
  if (!fd.valid() || fstat(fd.get(), &info) != 0 || !S_ISREG(info.st_mode) ||
      (info.st_uid != geteuid() && info.st_uid != 0))
    return "";
  return read_all(fd.get());
}

void make_parents(const std::string &path) {
  for (size_t at = path.find('/', 1); at != std::string::npos; at = path.find('/', at + 1))
    mkdir(path.substr(0, at).c_str(), 0700);  // what is there already stays as it is
}

phx_status write_table(const std::string &path, const std::string &text) {
  make_parents(path);
  std::string scratch = path + ".XXXXXX";
  Fd fd(mkostemp(scratch.data(), O_CLOEXEC));
  if (!fd.valid()) return fail_errno(errno, kSave, "%s: could not write beside %s", kSave, path.c_str());
  const bool written = write(fd.get(), text.data(), text.size()) == static_cast<ssize_t>(text.size());
  if (written && rename(scratch.c_str(), path.c_str()) == 0) return PHX_OK;
  const int error = errno;
  unlink(scratch.c_str());
  return fail_errno(error, kSave, "%s: could not write %s", kSave, path.c_str());
}

}  // namespace

std::string tuning_path() {
  if (const char *given = std::getenv("PHALANX_TUNING")) return given;
  if (const char *cache = std::getenv("XDG_CACHE_HOME"); cache != nullptr && *cache == '/')
    return std::string(cache) + "/phalanx/tuning";
  if (const char *home = std::getenv("HOME"); home != nullptr && *home == '/')
    return std::string(home) + "/.cache/phalanx/tuning";
  return "";
}

Tuning load_tuning(int group_size) {
  Tuning tuning;
  const std::string path = tuning_path();
  const std::string text = path.empty() ? "" : read_table(path);
  if (text.empty()) return tuning;
  const std::string host = host_key();
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    const Row row = parse(line);
    if (!is_for(row, host, group_size)) continue;
    take(row, "one_shot_bytes", &tuning.one_shot_bytes);
    take(row, "chunk_bytes", &tuning.chunk_bytes);
    take(row, "streaming_bytes", &tuning.streaming_bytes);
    take(row, "push_bytes", &tuning.push_bytes);
  }
  return tuning;
}

phx_status save_tuning(const std::string &given, int group_size, const Tuning &tuning) {
  const std::string path = given.empty() ? tuning_path() : given;
  if (path.empty())
    return fail(PHX_ERR_INVALID, kSave, "%s: no path was given, and neither PHALANX_TUNING nor HOME says where", kSave);
  const std::string host = host_key();
  std::string text;
  std::istringstream lines(read_table(path));
  for (std::string line; std::getline(lines, line);)
    if (!is_for(parse(line), host, group_size)) text += line + "\n";
  std::ostringstream row;
  row << "host=" << host << " ranks=" << group_size << " one_shot_bytes=" << tuning.one_shot_bytes
      << " chunk_bytes=" << tuning.chunk_bytes << " streaming_bytes=" << tuning.streaming_bytes
      << " push_bytes=" << tuning.push_bytes << "\n";
  return write_table(path, text + row.str());
}

}  // namespace phx
