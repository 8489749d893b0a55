// The built-in values, and the tuning table: a text file with one row for each host and group size, and one for each
// kind of GPU, group size, and whether ranks share a GPU (1) or have one each (0),
//
//   host=1f3a... ranks=2 one_shot_bytes=512 chunk_bytes=131072 ...
//   gpu=NVIDIA_H100_80GB_HBM3 ranks=8 shared=0 line_bytes=32768 two_shot_bytes=262144 ...
//
// Unknown keys are ignored, so that an older library can read a newer table.
#include "base/tuning.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <sstream>
#include <utility>
#include <vector>

#include "base/environment.h"
#include "base/fd.h"
#include "base/hash.h"

namespace phx {
namespace {

constexpr uint64_t kKiB = 1024;
constexpr uint64_t kMiB = 1024 * kKiB;
constexpr size_t kMostBytes = kMiB;  // of a table
using Row = std::map<std::string, std::string>;

// The words at the beginning of a row that identify it.
using Key = std::vector<std::pair<std::string, std::string>>;

std::string read_all(int fd) {
  std::string text;
  char buffer[4096];
  for (;;) {
    const ssize_t got = read(fd, buffer, sizeof buffer);
    if (got <= 0 || text.size() > kMostBytes) return text;
    text.append(buffer, static_cast<size_t>(got));
  }
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

Key key_of(int group_size) { return {{"host", tuning_host()}, {"ranks", std::to_string(group_size)}}; }

// Makes the GPU's name one word: "NVIDIA H100 80GB HBM3" has spaces.
Key key_of(const GpuPlace &place) {
  std::string name = place.gpu;
  for (char &letter : name)
    if (letter <= ' ' || letter > '~' || letter == '=') letter = '_';
  return {{"gpu", name}, {"ranks", std::to_string(place.group_size)}, {"shared", place.shared ? "1" : "0"}};
}

bool is_for(const Row &row, const Key &key) {
  return std::all_of(key.begin(), key.end(), [&](const auto &word) {
    const auto field = row.find(word.first);
    return field != row.end() && field->second == word.second;
  });
}

// Accepts only digits: strtoull would also read "-1", as 2^64 - 1. Leaves `value` as it is for 0 or a malformed number.
void read_value(const Row &row, const char *key, uint64_t *value) {
  const auto field = row.find(key);
  if (field == row.end()) return;
  const char *end = field->second.data() + field->second.size();
  uint64_t number = 0;
  const auto parsed = std::from_chars(field->second.data(), end, number);
  if (parsed.ec == std::errc() && parsed.ptr == end && number != 0) *value = number;
}

// Empty without a path. Ignores a file of another user, unless that is root: its values could do no harm but slow this
// process down. *problem, if not NULL, becomes the reason why a file that exists is not read.
std::string read_table(const std::string &path, std::string *problem = nullptr) {
  Fd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat info;
  const char *why = "";
  if (!fd.valid())
    why = errno == ENOENT || errno == ENOTDIR ? "" : "it cannot be opened";
  else if (fstat(fd.get(), &info) != 0 || !S_ISREG(info.st_mode))
    why = "it is not a regular file";
  else if (info.st_uid != geteuid() && info.st_uid != 0)
    why = "it belongs to another user";
  else
    return read_all(fd.get());
  if (problem != nullptr) *problem = why;
  return "";
}

void make_parents(const std::string &path) {
  for (size_t at = path.find('/', 1); at != std::string::npos; at = path.find('/', at + 1))
    mkdir(path.substr(0, at).c_str(), 0700);  // existing directories stay as they are
}

phx_status write_table(const char *operation, const std::string &path, const std::string &text) {
  make_parents(path);
  std::string scratch = path + ".XXXXXX";
  Fd fd(mkostemp(scratch.data(), O_CLOEXEC));
  if (!fd.valid()) return fail_errno(errno, operation, "could not create a temporary file next to %s", path.c_str());
  const bool written = write(fd.get(), text.data(), text.size()) == static_cast<ssize_t>(text.size());
  if (written && rename(scratch.c_str(), path.c_str()) == 0) return PHX_OK;
  const int error = errno;
  unlink(scratch.c_str());
  return fail_errno(error, operation, "could not write %s", path.c_str());
}

template <class Values>
Values load(const Key &key, const std::string &text) {
  Values values{};
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    const Row row = parse(line);
    if (!is_for(row, key)) continue;
    for (const TuningField<Values> &field : fields_of(&values)) read_value(row, field.key, &(values.*field.member));
  }
  return values;
}

template <class Values>
phx_status save(const char *operation, const std::string &path_or_empty, const Key &key, const Values &values) {
  const std::string path = path_or_empty.empty() ? tuning_path() : path_or_empty;
  if (path.empty())
    return fail(PHX_ERR_INVALID, operation, "no path was given, and neither PHALANX_TUNING nor HOME says where");
  std::string text;
  std::istringstream lines(read_table(path));
  for (std::string line; std::getline(lines, line);)
    if (!is_for(parse(line), key)) text += line + "\n";
  for (const auto &[name, value] : key) text.append(name).append("=").append(value).append(" ");
  const auto &fields = fields_of(&values);
  for (const TuningField<Values> &field : fields)
    text.append(&field == fields ? "" : " ").append(field.key).append("=").append(std::to_string(values.*field.member));
  return write_table(operation, path, text + "\n");
}

// What is wrong with the fields of a row; empty if nothing is.
template <class Values>
std::string damage_of(const Row &row) {
  for (const auto &field : fields_of(static_cast<const Values *>(nullptr))) {
    const auto word = row.find(field.key);
    if (word == row.end()) continue;
    uint64_t value = 0;
    read_value(row, field.key, &value);
    if (value < field.least || value > field.most || value % field.unit != 0 || value == 0)
      return std::string(field.key) + " is '" + word->second.substr(0, 40) + "'; expected " +
             std::to_string(std::max<uint64_t>(field.least, 1)) + " to " + std::to_string(field.most);
  }
  return "";
}

std::string damage_of(const std::string &line) {
  std::istringstream words(line);
  for (std::string word; words >> word;)
    if (word.find('=') == std::string::npos) return "'" + word.substr(0, 40) + "' is not of the form key=value";
  const Row row = parse(line);
  if (row.empty()) return "";
  if (row.count("ranks") == 0 || row.count("host") == row.count("gpu")) return "it names no host or GPU and ranks";
  return row.count("host") != 0 ? damage_of<Tuning>(row) : damage_of<GpuTuning>(row);
}

}  // namespace

// Measured with `phalanx tune` on two cores of a Xeon with AVX-512 and 2 MiB of second-level cache per core, and of an
// EPYC with AVX-512, 1 MiB per core and 32 MiB that they share: see docs/explanation/algorithms. Where the two differ,
// the value with which the worse of them loses less: `phalanx tune` finds the rest.
Tuning builtin_tuning(int group_size, int cores) {
  Tuning tuning{};
  // A barrier takes a rank with a core of its own a quarter of a microsecond, and one that shares its core several:
  // there the algorithms with fewer barriers win up to larger sizes. Without sharing, all_reduce of 2 KiB on the EPYC
  // takes 0.32 us with one-shot and 0.40 with two-shot.
  const bool crowded = group_size > cores;
  tuning.one_shot_bytes = crowded ? 8 * kKiB : 2 * kKiB;
  tuning.chunk_bytes = crowded ? 256 * kKiB : 128 * kKiB;
  // On the EPYC, with 4 MiB, all_gather of 4 MiB takes 451 us instead of 269.
  tuning.streaming_bytes = 8 * kMiB;
  tuning.push_bytes = 8 * kKiB;
  return tuning;
}

// Estimates for sm_90, not measured on a GPU yet. With two ranks, one-shot reads as much as two-shot.
GpuTuning builtin_gpu_tuning(int group_size) {
  GpuTuning tuning{};
  tuning.line_bytes = 32 * kKiB;  // all that fits into the pads
  tuning.two_shot_bytes = group_size > 2 ? 256 * kKiB : kNeverBytes;
  tuning.multicast_bytes = 64 * kKiB;  // multicast costs one more round over the pads, in which ranks compare offsets
  tuning.copy_bytes = kNeverBytes;
  tuning.thread_bytes = 16;  // the widest load of a GPU thread
  return tuning;
}

const std::string &tuning_host() {
  static const std::string *const host = [] {
    char name[256] = {};
    gethostname(name, sizeof name - 1);
    // The first 4 KiB have all about the first processor: to list hundreds takes the kernel long.
    const Fd fd(open("/proc/cpuinfo", O_RDONLY | O_CLOEXEC));
    char start[4096];
    const ssize_t got = fd.valid() ? read(fd.get(), start, sizeof start) : 0;
    const std::string text(start, got > 0 ? static_cast<size_t>(got) : 0);
    const size_t model = text.find("model name");
    const std::string facts =
        name + (model == std::string::npos ? "" : text.substr(model, text.find('\n', model) - model));
    char digits[17];
    std::snprintf(digits, sizeof digits, "%016" PRIx64, hash_bytes(facts.data(), facts.size()));
    return new std::string(digits);
  }();  // never destroyed: it may be read during exit
  return *host;
}

std::string tuning_path() {
  if (const char *path = read_variable<variable("PHALANX_TUNING")>()) return path;
  if (const char *cache = std::getenv("XDG_CACHE_HOME"); cache != nullptr && *cache == '/')
    return std::string(cache) + "/phalanx/tuning";
  if (const char *home = std::getenv("HOME"); home != nullptr && *home == '/')
    return std::string(home) + "/.cache/phalanx/tuning";
  return "";
}

std::string tuning_problem() {
  const std::string path = tuning_path();
  if (path.empty()) return "";
  std::string problem;
  std::istringstream lines(read_table(path, &problem));
  size_t number = 0;
  for (std::string line; problem.empty() && std::getline(lines, line);) {
    ++number;
    const std::string damage = damage_of(line);
    if (!damage.empty()) problem = "line " + std::to_string(number) + ": " + damage;
  }
  if (problem.empty()) return "";
  return "the tuning table " + path + " is damaged: " + problem +
         ". Built-in values are used in place of what cannot be read; run `phalanx tune` again, or delete the file.";
}

Tuning load_tuning(int group_size) {
  const std::string text = read_table(tuning_path());
  return text.empty() ? Tuning() : load<Tuning>(key_of(group_size), text);
}

GpuTuning load_gpu_tuning(const GpuPlace &place) { return load<GpuTuning>(key_of(place), read_table(tuning_path())); }

phx_status save_tuning(const std::string &path, int group_size, const Tuning &tuning) {
  return save("group_save_tuning", path, key_of(group_size), tuning);
}

phx_status save_gpu_tuning(const std::string &path, const GpuPlace &place, const GpuTuning &tuning) {
  return save("group_save_gpu_tuning", path, key_of(place), tuning);
}

}  // namespace phx
