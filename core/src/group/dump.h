// The flight recorder as JSON: the last calls of this rank and its peers.
#pragma once

#include <string>

#include "base/error.h"

namespace phx {

class Group;
class World;

std::string dump_world(const World &world);

// If PHALANX_DUMP names a folder, writes the dump of the group's world there, for a group that has just failed. Logs
// the cause and the file, or that the file could not be written.
void dump_failure(const Group &group, const ErrorInfo &cause);
std::string dump_problem();  // why PHALANX_DUMP names no such folder, for a warning; empty: it does, or is not set

}  // namespace phx
