// The log file and its lock, see the header, and the store in it. Nothing that is read from the file is believed before
// it is checked.
#include "store/file_log.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/error.h"
#include "base/wait.h"
#include "store/store.h"

namespace phx::store {
namespace {

constexpr uint64_t kMaxFileBytes = uint64_t{1} << 30;
constexpr size_t kChunk = size_t{64} << 10;  // read at once; larger than any record without its value

struct FileHeader {
  char magic[8];
  uint64_t committed;  // bytes of the file that are valid, this header included
};
constexpr FileHeader kEmpty{{'P', 'H', 'X', 'F', 'I', 'L', 'E', '1'}, sizeof(FileHeader)};

struct RecordHeader {  // the key and the value follow
  uint32_t kind;
  uint32_t key_size;
  uint32_t value_size;
  uint32_t value_checksum;
  uint32_t checksum;  // of the fields above and the key
};

// FNV-1a. It finds damage, not malice: a process that can write the file can also write a checksum.
uint32_t mix(uint32_t sum, uint32_t value) { return (sum ^ value) * 16777619u; }

uint32_t checksum(const void *data, size_t size) {
  const auto *bytes = static_cast<const uint8_t *>(data);
  uint32_t sum = 2166136261u;
  for (size_t i = 0; i < size; ++i) sum = mix(sum, bytes[i]);
  return sum;
}

uint32_t head_checksum(const RecordHeader &header, const char *key) {
  uint32_t sum = checksum(key, header.key_size);
  for (const uint32_t field : {header.kind, header.key_size, header.value_size, header.value_checksum})
    sum = mix(sum, field);
  return sum;
}

const char *wrong_with(const RecordHeader &header) {
  if (header.kind != FileLog::kSet && header.kind != FileLog::kRemove) return "an unknown kind of record";
  if (header.key_size == 0 || header.key_size > kMaxStoreKey) return "a key of impossible length";
  if (header.value_size > kMaxStoreValue) return "a value of impossible length";
  return nullptr;
}

phx_status check_owner(const char *operation, const char *path, int fd) {
  struct stat info;
  if (fstat(fd, &info) != 0) return fail_errno(errno, operation, "could not look at '%s'", path);
  if (!S_ISREG(info.st_mode))
    return fail(PHX_ERR_INVALID, operation, "'%s' is not a regular file; give another path", path);
  if (info.st_uid != geteuid())
    return fail(PHX_ERR_PERMISSION, operation,
                "'%s' belongs to user %u, but this process runs as user %u; give another path", path, info.st_uid,
                geteuid());
  // Reading counts too: ranks prove themselves to each other with what they put in the store.
  if ((info.st_mode & 077) != 0)
    return fail(PHX_ERR_PERMISSION, operation,
                "other users have access to '%s' (mode %03o); chmod it to 600, or remove it and let the store make it",
                path, info.st_mode & 0777);
  return PHX_OK;
}

}  // namespace

phx_status FileLog::open(const char *operation, const char *path, std::unique_ptr<FileLog> *out) {
  // O_NONBLOCK: opening a device or a pipe must not hang; it has no meaning for the regular file that we take.
  Fd fd(::open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY, 0600));
  if (!fd.valid()) {
    const int error = errno;
    if (error == ELOOP)
      return fail_errno(error, operation, "'%s' is a symbolic link, which the store does not follow", path);
    return fail_errno(error, operation, "could not open or make '%s'", path);
  }
  PHX_TRY(check_owner(operation, path, fd.get()));
  out->reset(new FileLog(path, std::move(fd)));
  return PHX_OK;
}

// ---- the lock

phx_status FileLog::lock(const char *operation, Access access, const Deadline &deadline) {
  phx_status status = PHX_IN_PROGRESS;
  // The pauses are short: the lock is held for microseconds, and it has no queue.
  Backoff(20, 250).until(deadline, [&] { return (status = try_lock(operation, access)) != PHX_IN_PROGRESS; });
  if (status == PHX_IN_PROGRESS)
    return fail(PHX_ERR_TIMEOUT, operation,
                "%s: the lock of '%s' was not free; see whether a process that uses the file is stopped",
                timed_out(deadline.budget_ms()).c_str(), path_.c_str());
  PHX_TRY(status);
  FileLock lock(*this, std::adopt_lock);
  PHX_TRY(refresh(operation));
  lock.release();  // the caller has it now
  return PHX_OK;
}

// Both locks are polled, because neither flock() nor a mutex can be waited for with a deadline.
phx_status FileLog::try_lock(const char *operation, Access access) {
  std::unique_lock<std::mutex> guard(mutex_, std::try_to_lock);
  if (!guard) return PHX_IN_PROGRESS;
  PHX_TRY(follow_fork(operation));
  const int how = (access == Access::kShared ? LOCK_SH : LOCK_EX) | LOCK_NB;
  if (flock(fd_.get(), how) == 0) {
    guard.release();  // unlock() gives it back
    return PHX_OK;
  }
  if (errno == EWOULDBLOCK || errno == EINTR) return PHX_IN_PROGRESS;
  return fail_errno(errno, operation, "could not lock '%s'", path_.c_str());
}

void FileLog::unlock() {
  flock(fd_.get(), LOCK_UN);
  mutex_.unlock();
}

// A forked child shares the parent's open file, and flock() would not keep the two apart: the child opens its own. By
// /proc, because the path may lead to another file by now, or to none.
phx_status FileLog::follow_fork(const char *operation) {
  if (opened_in_ == process_generation()) return PHX_OK;
  const std::string self = "/proc/self/fd/" + std::to_string(fd_.get());
  Fd own(::open(self.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK));
  if (!own.valid()) return fail_errno(errno, operation, "could not open '%s' again after a fork", path_.c_str());
  fd_ = std::move(own);
  opened_in_ = process_generation();
  return PHX_OK;
}

// ---- reading

bool FileLog::may_have_grown(uint64_t known) {
  FileHeader header;
  if (pread(fd_.get(), &header, sizeof header, 0) != static_cast<ssize_t>(sizeof header)) return true;
  return header.committed != known;
}

phx_status FileLog::refresh(const char *operation) {
  struct stat info;
  if (fstat(fd_.get(), &info) != 0) return fail_errno(errno, operation, "could not look at '%s'", path_.c_str());
  const auto file_size = static_cast<uint64_t>(info.st_size);
  if (file_size == 0 && known_ == 0) return PHX_OK;  // new: the first writer puts the header there
  FileHeader header;
  if (file_size < sizeof header) return damaged(operation, 0, "fewer bytes than the header has");
  PHX_TRY(read_at(operation, &header, sizeof header, 0));
  if (std::memcmp(header.magic, kEmpty.magic, sizeof kEmpty.magic) != 0)
    return damaged(operation, 0, "no magic number of a store");
  if (header.committed < sizeof header || header.committed > file_size || header.committed > kMaxFileBytes)
    return damaged(operation, offsetof(FileHeader, committed), "a count of bytes that does not fit the file");
  if (header.committed < known_)
    return damaged(operation, offsetof(FileHeader, committed), "less than was read before");
  return read_records(operation, header.committed);
}

phx_status FileLog::read_records(const char *operation, uint64_t committed) {
  uint64_t at = known_ = std::max<uint64_t>(known_, sizeof(FileHeader));
  std::string chunk;
  uint64_t chunk_at = 0;
  while (at < committed) {
    const uint64_t left = committed - at;
    const size_t wanted = static_cast<size_t>(std::min<uint64_t>(left, sizeof(RecordHeader) + kMaxStoreKey));
    if (chunk.empty() || at + wanted > chunk_at + chunk.size()) {
      chunk.resize(static_cast<size_t>(std::min<uint64_t>(left, kChunk)));
      chunk_at = at;
      PHX_TRY(read_at(operation, &chunk[0], chunk.size(), at));
    }
    const char *bytes = chunk.data() + (at - chunk_at);
    RecordHeader header;
    if (left < sizeof header) return damaged(operation, at, "half a record");
    std::memcpy(&header, bytes, sizeof header);
    const char *wrong = wrong_with(header);
    if (wrong != nullptr) return damaged(operation, at, wrong);
    const uint64_t size = sizeof header + uint64_t{header.key_size} + header.value_size;
    if (size > left) return damaged(operation, at, "a record that is longer than the file");
    const char *key = bytes + sizeof header;
    if (head_checksum(header, key) != header.checksum) return damaged(operation, at, "a record with a wrong checksum");
    const std::string name(key, header.key_size);
    if (header.kind == kSet)
      index_[name] = Location{at + sizeof header + header.key_size, header.value_size, header.value_checksum};
    else
      index_.erase(name);
    at += size;
    known_ = at;
  }
  return PHX_OK;
}

const FileLog::Location *FileLog::find(const char *key) const {
  const auto found = index_.find(key);
  return found == index_.end() ? nullptr : &found->second;
}

phx_status FileLog::read_value(const char *operation, const char *key, const Location &place, std::string *value) {
  std::string bytes(place.size, '\0');
  PHX_TRY(read_at(operation, &bytes[0], bytes.size(), place.offset));
  if (checksum(bytes.data(), bytes.size()) != place.checksum)
    return fail(PHX_ERR_INVALID, operation,
                "the value of key '%.128s' in '%s' is damaged (wrong checksum at byte %llu); remove the file and "
                "start again",
                key, path_.c_str(), static_cast<unsigned long long>(place.offset));
  *value = std::move(bytes);
  return PHX_OK;
}

// ---- writing

phx_status FileLog::append(const char *operation, Kind kind, const char *key, const void *value, size_t size) {
  // The library's own calls are not checked by the C functions, and what is too long would spoil the file for all.
  PHX_TRY(check_key(operation, key));
  PHX_TRY(check_value(operation, value, size));
  RecordHeader header{kind, static_cast<uint32_t>(std::strlen(key)), static_cast<uint32_t>(size), checksum(value, size),
                      0};
  header.checksum = head_checksum(header, key);
  const uint64_t at = std::max<uint64_t>(known_, sizeof(FileHeader));
  const uint64_t end = at + sizeof header + header.key_size + size;
  if (end > kMaxFileBytes)
    return fail(PHX_ERR_NO_MEMORY, operation,
                "'%s' is full: it holds %llu bytes of at most %llu; go on with a new file", path_.c_str(),
                static_cast<unsigned long long>(at), static_cast<unsigned long long>(kMaxFileBytes));
  std::string record(reinterpret_cast<const char *>(&header), sizeof header);
  record.append(key, header.key_size);
  // The header before anything else, so that a process that dies meanwhile leaves an empty store or an empty file.
  if (known_ == 0) PHX_TRY(write_at(operation, &kEmpty, sizeof kEmpty, 0));
  PHX_TRY(write_at(operation, record.data(), record.size(), at));
  PHX_TRY(write_at(operation, value, size, at + record.size()));
  // Last, because it makes the record valid. The index follows at the next refresh, which reads the file itself.
  return write_at(operation, &end, sizeof end, offsetof(FileHeader, committed));
}

// ---- system calls

phx_status FileLog::read_at(const char *operation, void *data, size_t size, uint64_t offset) const {
  const size_t moved = move_all(size, [&](size_t at, size_t left) {
    return pread(fd_.get(), static_cast<char *>(data) + at, left, static_cast<off_t>(offset + at));
  });
  if (moved == size) return PHX_OK;
  if (errno == 0) return damaged(operation, offset + moved, "the end of the file");
  return fail_errno(errno, operation, "could not read '%s'", path_.c_str());
}

phx_status FileLog::write_at(const char *operation, const void *data, size_t size, uint64_t offset) const {
  const size_t moved = move_all(size, [&](size_t at, size_t left) {
    return pwrite(fd_.get(), static_cast<const char *>(data) + at, left, static_cast<off_t>(offset + at));
  });
  return moved == size ? PHX_OK : fail_errno(errno, operation, "could not write '%s'", path_.c_str());
}

phx_status FileLog::damaged(const char *operation, uint64_t offset, const char *what) const {
  return fail(
      PHX_ERR_INVALID, operation,
      "'%s' is damaged, or is not the file of a store: at byte %llu there is %s; remove it, or give another path",
      path_.c_str(), static_cast<unsigned long long>(offset), what);
}

// ---- the store: what the operations mean in terms of the log

namespace {

class FileStore final : public phx_store {
 public:
  explicit FileStore(std::unique_ptr<FileLog> log) : log_(std::move(log)) {}

  phx_status set(const char *key, const void *value, size_t size) override {
    return exclusively("store_set",
                       [&](const char *operation) { return log_->append(operation, FileLog::kSet, key, value, size); });
  }
  // Nothing wakes a reader of a file, so it looks again after growing pauses.
  phx_status await(const char *operation, const char *key, std::string *value, const Deadline &deadline) override {
    Backoff backoff(50, 5000);
    for (;;) {
      uint64_t known = 0;  // what this look has seen: another thread of this store may see more meanwhile
      const phx_status status = look(operation, key, value, deadline, &known);
      if (status != PHX_IN_PROGRESS) return status;
      do {
        if (deadline.passed()) return fail_key_timeout(operation, key, deadline);
        backoff.pause(deadline);
      } while (!log_->may_have_grown(known));
    }
  }
  phx_status add(const char *key, int64_t delta, int64_t *result) override {
    return exclusively("store_add", [&](const char *operation) { return add_locked(operation, key, delta, result); });
  }
  phx_status remove(const char *key) override {
    return exclusively("store_remove", [&](const char *operation) -> phx_status {
      if (log_->find(key) == nullptr) return fail_key_missing(operation, key);
      return log_->append(operation, FileLog::kRemove, key, nullptr, 0);
    });
  }

 private:
  // Runs `body` with the lock and with all that is in the file known.
  template <class Body>
  phx_status exclusively(const char *operation, Body &&body) {
    PHX_TRY(log_->lock(operation, FileLog::Access::kExclusive, Deadline::after_ms(CallTimeout::ms())));
    const FileLock lock(*log_, std::adopt_lock);
    return body(operation);
  }

  phx_status add_locked(const char *operation, const char *key, int64_t delta, int64_t *result) {
    std::string current;
    const FileLog::Location *place = log_->find(key);
    if (place != nullptr) PHX_TRY(log_->read_value(operation, key, *place, &current));
    int64_t sum = 0;
    PHX_TRY(add_to_counter(key, place == nullptr ? nullptr : &current, delta, &sum));
    const std::string text = std::to_string(sum);
    PHX_TRY(log_->append(operation, FileLog::kSet, key, text.data(), text.size()));
    *result = sum;
    return PHX_OK;
  }

  // PHX_IN_PROGRESS: the key is not there.
  phx_status look(const char *operation, const char *key, std::string *value, const Deadline &deadline,
                  uint64_t *known) {
    PHX_TRY(log_->lock(operation, FileLog::Access::kShared, deadline));
    const FileLock lock(*log_, std::adopt_lock);
    *known = log_->known();
    const FileLog::Location *place = log_->find(key);
    if (place == nullptr) return PHX_IN_PROGRESS;
    return value == nullptr ? PHX_OK : log_->read_value(operation, key, *place, value);
  }

  std::unique_ptr<FileLog> log_;
};

}  // namespace

phx_status make_file_store(const char *operation, const char *path, phx_store **out) {
  PHX_TRY(check_out(operation, out));
  if (path == nullptr || *path == '\0') return fail(PHX_ERR_INVALID, operation, "the path is empty");
  std::unique_ptr<FileLog> log;
  PHX_TRY(FileLog::open(operation, path, &log));
  // A file of something else is refused now and not by a later get.
  PHX_TRY(log->lock(operation, FileLog::Access::kShared, Deadline::after_ms(kDefaultTimeoutMs)));
  log->unlock();
  *out = new FileStore(std::move(log));
  return PHX_OK;
}

}  // namespace phx::store
