// The flight recorder as JSON: the last calls of this rank and its peers.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <cinttypes>
#include <cstdio>

#include "base/environment.h"
#include "base/fd.h"
#include "base/ticks.h"
#include "group/group.h"

namespace phx {
namespace {

std::string quoted(const char *text) {
  std::string out = "\"";
  for (const char *c = text; *c != '\0'; ++c) {
    char escape[8];
    const auto byte = static_cast<unsigned char>(*c);
    std::snprintf(escape, sizeof escape, byte < 0x20 ? "\\u%04x" : byte == '"' || byte == '\\' ? "\\%c" : "%c", byte);
    out += escape;
  }
  return out + "\"";
}

// A JSON array of the results of write(0) to write(count - 1), without the empty ones.
template <class Write>
std::string array_json(size_t count, Write write) {
  std::string out = "[";
  for (size_t i = 0; i < count; ++i) {
    const std::string element = write(i);
    if (!element.empty()) out += (out.size() > 1 ? ",\n" : "") + element;
  }
  return out + "]";
}

std::string error_json(const ErrorInfo &cause) {
  return "{\"status\": " + quoted(phx_status_name(cause.status)) + ", \"rank\": " + std::to_string(cause.rank) +
         ", \"peer\": " + std::to_string(cause.peer) + ", \"operation\": " + quoted(cause.operation) +
         ", \"sequence\": " + std::to_string(cause.sequence) + ", \"text\": " + quoted(cause.text) + "}";
}

std::string entry_json(const Recorded &entry, const TickScale &scale) {
  const CallRecord &call = entry.call;
  const bool complete = entry.end_ticks != 0;
  const char *status = !complete ? "pending" : entry.status == PHX_OK ? "ok" : phx_status_name(entry.status);
  return "{\"sequence\": " + std::to_string(entry.sequence) + ", \"call\": " + quoted(name_of(call)) +
         ", \"dtype\": " + (call.dtype != 0 ? quoted(phx_dtype_name(call.dtype)) : "null") +
         ", \"count\": " + std::to_string(call.count) +
         ", \"op\": " + (call.op != 0 && call.op != kComparesGraphs ? quoted(phx_op_name(call.op)) : "null") +
         ", \"root\": " + (call.root >= 0 ? std::to_string(call.root) : "null") +
         ", \"bytes\": " + std::to_string(call.count * phx_dtype_size(call.dtype)) +
         ", \"algorithm\": " + std::to_string(call.algo >> 4) +
         ", \"start_ns\": " + std::to_string(scale.ns(entry.start_ticks)) +
         ", \"end_ns\": " + (complete ? std::to_string(scale.ns(entry.end_ticks)) : "null") +
         ", \"status\": " + quoted(status) + "}";
}

std::string channel_json(uint32_t channel, const History &history, const TickScale &scale) {
  std::vector<Recorded> entries;
  Recorded recorded;
  for (uint32_t i = 0; i < history.count(); ++i)
    if (history.read(i, &recorded)) entries.push_back(recorded);
  if (entries.empty()) return "";
  std::sort(entries.begin(), entries.end(),
            [](const Recorded &a, const Recorded &b) { return a.sequence < b.sequence; });
  uint64_t completed = 0;
  for (const Recorded &entry : entries)
    if (entry.end_ticks != 0) completed = entry.sequence;
  return "{\"channel\": " + std::to_string(channel) + ", \"started\": " + std::to_string(entries.back().sequence) +
         ", \"completed\": " + std::to_string(completed) +
         ", \"entries\": " + array_json(entries.size(), [&](size_t i) { return entry_json(entries[i], scale); }) + "}";
}

std::string group_json(Group &group, const TickScale &scale) {
  char id[24];
  std::snprintf(id, sizeof id, "\"0x%016" PRIx64 "\"", group.id());
  const bool failed = group.failed();
  return "{\"name\": " + quoted(group.name().c_str()) + ", \"id\": " + id +
         ", \"state\": " + (failed ? "\"failed\"" : "\"active\"") +
         ", \"error\": " + (failed ? error_json(group.cause()) : "null") + ", \"members\": " +
         array_json(group.size(),
                    [&](size_t i) {
                      const auto member = static_cast<int>(i);
                      const bool is_here = group.hosts().is_here(member);
                      const int position = group.hosts().position(member);
                      return "{\"rank\": " + std::to_string(group.rank_of(member)) +
                             ", \"pid\": " + std::to_string(group.pid_of(member)) +
                             ", \"process\": " + quoted(group.process_of(member)) + ", \"channels\": " +
                             array_json(is_here ? group.channels() : 0,
                                        [&](size_t channel) {
                                          const auto index = static_cast<uint32_t>(channel);
                                          return channel_json(index, group.lane(index).history_of(position), scale);
                                        }) +
                             "}";
                    }) +
         "}";
}

int64_t unix_ns() { return std::chrono::nanoseconds(std::chrono::system_clock::now().time_since_epoch()).count(); }

phx_status write_file(const std::string &path, const std::string &text) {
  const Fd fd(open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
  if (!fd.valid()) return PHX_ERR_SYSTEM;
  const auto write_some = [&](size_t offset, size_t left) { return write(fd.get(), text.data() + offset, left); };
  return move_all(text.size(), write_some) == text.size() ? PHX_OK : PHX_ERR_SYSTEM;
}

}  // namespace

std::string dump_world(const World &world) {
  const TickScale scale;
  char host[256] = "";
  gethostname(host, sizeof host - 1);
  const auto groups = groups_of(world);
  return "{\"format\": \"phalanx-flight-recorder\", \"version\": 1, \"phalanx\": " + quoted(phx_version()) +
         ", \"host\": " + quoted(host) + ", \"rank\": " + std::to_string(world.rank()) +
         ", \"world_size\": " + std::to_string(world.size()) + ", \"pid\": " + std::to_string(world.record().pid) +
         ", \"dumped_ns\": " + std::to_string(now_ns()) + ", \"dumped_unix_ns\": " + std::to_string(unix_ns()) +
         ",\n\"groups\": " + array_json(groups.size(), [&](size_t i) { return group_json(*groups[i], scale); }) + "}\n";
}

std::string dump_problem() {
  const char *const folder = read_variable<variable("PHALANX_DUMP")>();
  if (folder == nullptr || *folder == '\0') return "";
  struct stat info {};
  const bool is_there = stat(folder, &info) == 0;
  if (is_there && S_ISDIR(info.st_mode) && access(folder, W_OK | X_OK) == 0) return "";
  return std::string("PHALANX_DUMP is '") + folder + "', which " +
         (!is_there               ? "does not exist"
          : S_ISDIR(info.st_mode) ? "this user cannot write to"
                                  : "is not a folder") +
         "; no flight recorder will be written when a group fails. Name an existing folder that can be written to.";
}

void dump_failure(const Group &group, const ErrorInfo &cause) {
  const char *folder = read_variable<variable("PHALANX_DUMP")>();
  if (folder == nullptr || *folder == '\0') return;
  static std::atomic<unsigned> dumps{0};
  const World &world = group.world();
  const std::string path = std::string(folder) + "/phalanx-" + std::to_string(unix_ns() / 1000000000) + "-rank" +
                           std::to_string(world.rank()) + "-pid" + std::to_string(world.record().pid) + "-" +
                           std::to_string(++dumps) + ".json";
  if (write_file(path, dump_world(world)) == PHX_OK)
    PHX_LOG(PHX_LOG_WARNING, "group '%s' failed (%s); flight recorder: %s", group.name().c_str(), cause.text,
            path.c_str());
  else
    PHX_LOG(PHX_LOG_ERROR, "group '%s' failed (%s); its flight recorder cannot be written to %s", group.name().c_str(),
            cause.text, path.c_str());
}

}  // namespace phx
