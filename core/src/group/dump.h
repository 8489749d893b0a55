// The flight recorder as JSON: what this rank and its peers called last, and who waits for whom.
#pragma once

#include <string>

#include "base/error.h"

namespace phx {

class Group;
class World;

std::string dump_world(const World &world);

// Where PHALANX_DUMP names a folder: writes the dump of the group's world there, for a group that has failed just now.
// Logs where and why, or why it could not.
void dump_failure(const Group &group, const ErrorInfo &cause);

}  // namespace phx
