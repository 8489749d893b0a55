// The file store's log, opened on a file of arbitrary bytes, which change while it is open.
//
// Whoever can write the file, or a disk that fails, controls its bytes and its length. Every operation must end with a
// right value or an error that names the file; what is appended to a log that is whole must be found again, by this
// handle and by a new one, and nothing before it may change.
#include <cstddef>

#include "base/fd.h"
#include "input.h"
#include "store/file_log.h"

using namespace phx::store;

namespace {

constexpr const char *kKeys[] = {"a", "key", "counter"};
constexpr size_t kHeaderBytes = 16;  // magic, count of committed bytes
constexpr size_t kCountAt = 8;

const std::string &path() {
  static const fuzz::Directory directory;
  static const std::string path = directory.path() + "/store";
  return path;
}

// The checksum of the log, so that inputs reach what lies behind it.
uint32_t mix(uint32_t sum, uint32_t value) { return (sum ^ value) * 16777619u; }
uint32_t checksum(const char *bytes, size_t size) {
  uint32_t sum = 2166136261u;
  for (size_t i = 0; i < size; ++i) sum = mix(sum, static_cast<uint8_t>(bytes[i]));
  return sum;
}

// Makes a log of any bytes: the magic, the count, and the checksums of as many records as there are.
void repair(std::string *file) {
  if (file->size() < kHeaderBytes) return;
  const uint64_t committed = file->size();
  file->replace(0, kCountAt, "PHXFILE1");
  std::memcpy(&(*file)[kCountAt], &committed, sizeof committed);
  uint32_t fields[5];  // kind, key size, value size, checksum of the value, checksum of the rest
  for (size_t at = kHeaderBytes; file->size() - at >= sizeof fields;) {
    char *record = &(*file)[at];
    std::memcpy(fields, record, sizeof fields);
    fields[0] = 0x50480001 + (fields[0] & 1);
    const size_t left = file->size() - at - sizeof fields;
    if (left == 0) return;
    fields[1] = static_cast<uint32_t>(1 + fields[1] % std::min<size_t>(left, 1024));
    fields[2] = static_cast<uint32_t>(fields[2] % (left - fields[1] + 1));
    const char *key = record + sizeof fields;
    fields[3] = checksum(key + fields[1], fields[2]);
    fields[4] = checksum(key, fields[1]);
    for (int i = 0; i < 4; ++i) fields[4] = mix(fields[4], fields[i]);
    std::memcpy(record, fields, sizeof fields);
    at += sizeof fields + fields[1] + fields[2];
  }
}

class File {
 public:
  File() : fd_(open(path().c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600)) { MUST(fd_.valid()); }
  void write(const std::string &bytes, off_t at) {
    MUST(pwrite(fd_.get(), bytes.data(), bytes.size(), at) == static_cast<ssize_t>(bytes.size()));
  }
  void cut(off_t size) { MUST(ftruncate(fd_.get(), size) == 0); }
  std::string read() {
    std::string bytes(static_cast<size_t>(lseek(fd_.get(), 0, SEEK_END)), '\0');
    MUST(pread(fd_.get(), &bytes[0], bytes.size(), 0) == static_cast<ssize_t>(bytes.size()));
    return bytes;
  }

 private:
  phx::Fd fd_;
};

// The file is in the error, but where an argument was wrong.
void check(phx_status status) {
  MUST(status == PHX_OK || (fuzz::is_error(status) && std::strstr(phx_last_error(), path().c_str()) != nullptr));
}

void read_all(FileLog &log) {
  for (const char *key : kKeys) {
    const FileLog::Location *place = log.find(key);
    std::string value;
    if (place == nullptr) continue;
    const phx_status status = log.read_value("get", key, *place, &value);
    check(status);
    if (status == PHX_OK) MUST(value.size() == place->size && checksum(value.data(), value.size()) == place->checksum);
  }
}

// False also when bytes that `log` has read before have changed since, which it need not notice.
bool whole() {
  std::unique_ptr<FileLog> log;
  MUST(FileLog::open("open", path().c_str(), &log) == PHX_OK);
  return log->refresh("open") == PHX_OK;
}

void append(FileLog &log, File &file, const char *key, const std::string &value) {
  const uint64_t known = log.known();
  const std::string before = file.read();
  MUST(log.append("set", FileLog::kSet, key, value.data(), value.size()) == PHX_OK);
  MUST(log.refresh("set") == PHX_OK);
  const std::string after = file.read();
  for (size_t i = kHeaderBytes; i < known; ++i) MUST(after[i] == before[i]);
  std::unique_ptr<FileLog> again;
  MUST(FileLog::open("open", path().c_str(), &again) == PHX_OK && again->refresh("open") == PHX_OK);
  for (FileLog *each : {&log, again.get()}) {
    const FileLog::Location *place = each->find(key);
    std::string found;
    MUST(place != nullptr && each->read_value("get", key, *place, &found) == PHX_OK && found == value);
  }
  MUST(log.append("remove", FileLog::kRemove, key, nullptr, 0) == PHX_OK && log.refresh("remove") == PHX_OK &&
       log.find(key) == nullptr);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  fuzz::Input input(data, size);
  const uint8_t how = input.byte();
  std::string bytes = input.piece();
  if ((how & 1) != 0) repair(&bytes);
  File file;
  file.cut(0);
  file.write(bytes, 0);

  std::unique_ptr<FileLog> log;
  MUST(FileLog::open("open", path().c_str(), &log) == PHX_OK);
  for (int i = 0; i < 4; ++i) {
    const phx_status status = log->lock("open", FileLog::Access::kExclusive, phx::Deadline::after_ms(1000));
    check(status);
    const FileLock lock = status == PHX_OK ? FileLock(*log, std::adopt_lock) : FileLock();
    read_all(*log);
    if (status == PHX_OK && whole()) append(*log, file, kKeys[input.below(3)], input.bytes(input.byte()));
    switch (input.below(4)) {
      case 0: file.cut(input.take<uint16_t>()); break;
      case 1: file.write(input.bytes(input.byte()), input.take<uint16_t>()); break;
      default: break;
    }
  }
  (void)log->may_have_grown(log->known());
  return 0;
}
