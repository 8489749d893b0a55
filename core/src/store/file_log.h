// The file behind the file store: a log of records that every process of the host appends to and reads.
//
// The file starts with a magic number and the count of committed bytes. A writer, alone under the lock, puts its record
// after the committed bytes and then moves the count: a process that dies in between leaves nothing behind but bytes
// that the next writer overwrites. All numbers are in the byte order of the host, which all its processes share.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

#include "base/deadline.h"
#include "base/fd.h"
#include "base/fork.h"

namespace phx::store {

class FileLog {
 public:
  struct Location {  // where the value of a key lies
    uint64_t offset;
    uint32_t size;
    uint32_t checksum;
  };
  enum class Access { kShared, kExclusive };
  enum Kind : uint32_t { kSet = 0x50480001, kRemove = 0x50480002 };  // of a record

  // Opens or makes the file, and checks whose it is.
  static phx_status open(const char *operation, const char *path, std::unique_ptr<FileLog> *out);

  // Takes the lock of the file against other processes and, at the same time, that of this object against other
  // threads, and learns what others have appended. A FileLock gives both back.
  phx_status lock(const char *operation, Access access, const Deadline &deadline);
  void unlock();

  // All of these need the lock; append needs it exclusive.
  phx_status refresh(const char *operation);    // learns what others have appended
  const Location *find(const char *key) const;  // as of the last refresh
  phx_status read_value(const char *operation, const char *key, const Location &place, std::string *value);
  phx_status append(const char *operation, Kind kind, const char *key, const void *value, size_t size);

  // Needs no lock: false while no record was appended since `known`. A wrong true merely costs a refresh.
  bool may_have_grown(uint64_t known);
  // How many bytes of the file are in the index: read under the lock, and given to may_have_grown later.
  uint64_t known() const { return known_; }

 private:
  FileLog(std::string path, Fd fd) : path_(std::move(path)), fd_(std::move(fd)) {}
  phx_status try_lock(const char *operation, Access access);  // PHX_IN_PROGRESS: it is not free
  phx_status follow_fork(const char *operation);
  phx_status read_records(const char *operation, uint64_t committed);
  phx_status read_at(const char *operation, void *data, size_t size, uint64_t offset) const;
  phx_status write_at(const char *operation, const void *data, size_t size, uint64_t offset) const;
  phx_status damaged(const char *operation, uint64_t offset, const char *what) const;

  std::string path_;
  Fd fd_;
  uint32_t opened_in_ = process_generation();  // the process that opened fd_
  AcrossForks<std::mutex> mutex_;
  std::unordered_map<std::string, Location> index_;
  uint64_t known_ = 0;  // bytes that index_ tells about
};

// Holds for a scope the lock that FileLog::lock took: FileLock lock(log, std::adopt_lock).
using FileLock = std::unique_lock<FileLog>;

}  // namespace phx::store
