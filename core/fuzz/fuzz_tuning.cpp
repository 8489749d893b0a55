// The tuning table: a text that another version of Phalanx, another host that shares the home directory, or an editor
// has written.
//
// Reading must never fail, and give only what a row for this host and group size says in plain digits. Writing a row
// must leave all rows for others as they are, and what was written must be read again.
#include <sstream>

#include "base/fd.h"
#include "base/tuning.h"
#include "input.h"

using phx::Tuning;

namespace {

constexpr int kGroupSize = 2;

const std::string &path() {
  static const fuzz::Directory directory;
  static const std::string path = directory.path() + "/tuning";
  return path;
}

void write_file(const std::string &bytes) {
  const phx::Fd fd(open(path().c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
  MUST(fd.valid() && write(fd.get(), bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()));
}

std::string read_file() {
  const phx::Fd fd(open(path().c_str(), O_RDONLY | O_CLOEXEC));
  MUST(fd.valid());
  std::string bytes(static_cast<size_t>(lseek(fd.get(), 0, SEEK_END)), '\0');
  MUST(pread(fd.get(), &bytes[0], bytes.size(), 0) == static_cast<ssize_t>(bytes.size()));
  return bytes;
}

// "host=1f3a...": how rows for this host begin.
const std::string &this_host() {
  static const std::string host = [] {
    unlink(path().c_str());
    MUST(phx::save_tuning("", kGroupSize, Tuning()) == PHX_OK);
    const std::string row = read_file();
    return row.substr(0, row.find(' '));
  }();
  return host;
}

// Inputs are the same on every host: they call it H.
std::string for_this_host(std::string text) {
  for (size_t at = 0; (at = text.find("host=H", at)) != std::string::npos; at += this_host().size())
    text.replace(at, 6, this_host());
  return text;
}

// A value in the table that is not zero stands there in digits.
void check_said(const std::string &text, const char *key, uint64_t value) {
  if (value == 0) return;
  const std::string digits = std::to_string(value);
  bool said = false;
  for (size_t at = 0; !said && (at = text.find(key, at)) != std::string::npos; ++at) {
    size_t number = at + std::strlen(key);
    while (number < text.size() && text[number] == '0') ++number;
    said = text.compare(number, digits.size(), digits) == 0;
  }
  MUST(said);
}

bool same(const Tuning &a, const Tuning &b) {
  return a.one_shot_bytes == b.one_shot_bytes && a.chunk_bytes == b.chunk_bytes &&
         a.streaming_bytes == b.streaming_bytes && a.push_bytes == b.push_bytes;
}

bool same(const phx::GpuTuning &a, const phx::GpuTuning &b) { return std::memcmp(&a, &b, sizeof a) == 0; }

// The lines that are not for this host, as far as plain text tells.
std::string others(const std::string &text) {
  std::string kept;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);)
    if (line.find(this_host()) == std::string::npos) kept += line + "\n";
  return kept;
}

}  // namespace

extern "C" int LLVMFuzzerInitialize(int *, char ***) {
  setenv("PHALANX_TUNING", path().c_str(), 1);
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  const std::string text = for_this_host(std::string(reinterpret_cast<const char *>(data), size));
  write_file(text);
  const Tuning read = phx::load_tuning(kGroupSize);
  check_said(text, "one_shot_bytes=", read.one_shot_bytes);
  check_said(text, "chunk_bytes=", read.chunk_bytes);
  check_said(text, "streaming_bytes=", read.streaming_bytes);
  check_said(text, "push_bytes=", read.push_bytes);
  const Tuning merged = phx::merge_tuning(read, phx::builtin_tuning(kGroupSize, 2));
  MUST(merged.chunk_bytes != 0 && merged.push_bytes != 0);
  (void)phx::check_tuning("fuzz", merged);

  MUST(phx::save_tuning("", kGroupSize, read) == PHX_OK);
  MUST(same(phx::load_tuning(kGroupSize), read));
  MUST(others(read_file()) == others(text));

  const phx::GpuPlace place{"G", kGroupSize, false};
  const phx::GpuTuning of_gpu = phx::load_gpu_tuning(place);
  check_said(text, "line_bytes=", of_gpu.line_bytes);
  check_said(text, "two_shot_bytes=", of_gpu.two_shot_bytes);
  check_said(text, "multicast_bytes=", of_gpu.multicast_bytes);
  check_said(text, "copy_bytes=", of_gpu.copy_bytes);
  check_said(text, "thread_bytes=", of_gpu.thread_bytes);
  const phx::GpuTuning whole = phx::merge_tuning(of_gpu, phx::builtin_gpu_tuning(kGroupSize));
  MUST(whole.line_bytes != 0 && whole.thread_bytes != 0);
  (void)phx::check_tuning("fuzz", whole);
  MUST(phx::save_gpu_tuning("", place, whole) == PHX_OK);
  MUST(same(phx::load_gpu_tuning(place), whole));
  return 0;
}
