// Ranks that mpiexec has started: MPI carries the address of a store, and Phalanx does the rest.
#include <mpi.h>

#include <cstdio>
#include <optional>
#include <phalanx/phalanx.hpp>
#include <random>
#include <vector>

// What rank 0 tells all others. On several hosts, address is one of rank 0's host that the others reach.
struct Meeting {
  char address[64] = "127.0.0.1";
  char token[64] = "";
  uint16_t port = 0;
};

int main(int argc, char **argv) try {
  MPI_Init(&argc, &argv);
  int rank = 0;
  int size = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  // [mpi]
  Meeting meeting;
  std::optional<phalanx::Store::Served> served;
  if (rank == 0) {
    std::random_device random;
    std::snprintf(meeting.token, sizeof meeting.token, "%08x%08x%08x%08x", random(), random(), random(), random());
    served.emplace(phalanx::Store::tcp_serve(meeting.address, meeting.token));
    meeting.port = served->port;
  }
  MPI_Bcast(&meeting, sizeof meeting, MPI_BYTE, 0, MPI_COMM_WORLD);
  const auto store = phalanx::Store::tcp_connect(meeting.address, meeting.port, meeting.token);
  const auto world = phalanx::World::create(rank, size, store);
  const auto group = world.group("everyone");
  // [mpi end]
  std::vector<double> values(100, rank + 1.0);
  group.all_reduce(values, values);
  std::printf("rank %d of %d: the sum is %g\n", rank, size, values[99]);
  MPI_Barrier(MPI_COMM_WORLD);  // rank 0, which serves the store, leaves last
  MPI_Finalize();
  return values[99] == size * (size + 1) / 2.0 ? 0 : 1;
} catch (const phalanx::Error &error) {
  std::fprintf(stderr, "%s\n", error.what());
  MPI_Abort(MPI_COMM_WORLD, 1);
}
