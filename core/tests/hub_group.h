// A group whose ranks, threads of this process, are on several hosts, which the carrier of the tests joins.
#pragma once

#include <functional>
#include <vector>

#include "hub_carrier.h"
#include "ranks.h"

using Shape = std::vector<int>;  // the host of each rank
using Body = std::function<void(int rank, phx_group *group, phx_world *world)>;

inline void with_hosts(const Shape &shape, const HubOptions &hub_options, const Body &body, uint32_t flags = 0) {
  Hub hub(hub_options);
  ranks::Options options;
  options.flags = flags;
  for (const int host : shape) options.host_ids.push_back(1000 + static_cast<uint64_t>(host));
  options.prepare = [&hub](phx_world *world) { CHECK_OK(phx_world_set_carrier(world, hub_carrier_ops(), &hub)); };
  ranks::as_threads(
      static_cast<int>(shape.size()),
      [&](int rank, phx_world *world) {
        phx_group *group = ranks::make_group(world);
        body(rank, group, world);
        phx_group_release(group);
      },
      options);
  hub.check();
}
