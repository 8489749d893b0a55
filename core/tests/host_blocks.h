// Runs kernels of cuda/ on the host: each thread of each block of each rank is a thread of the system.
#pragma once

#include <pthread.h>

#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "gpu/block.h"

namespace host_blocks {

class Block {
 public:
  Block(uint32_t number, uint32_t blocks, uint32_t threads) : number(number), blocks(blocks), threads(threads) {
    pthread_barrier_init(&barrier_, nullptr, threads);
  }
  ~Block() { pthread_barrier_destroy(&barrier_); }
  Block(const Block &) = delete;
  Block &operator=(const Block &) = delete;
  void sync() { pthread_barrier_wait(&barrier_); }

  const uint32_t number, blocks, threads;
  int32_t met = 0;  // written between two syncs

 private:
  pthread_barrier_t barrier_;
};

struct Thread {
  Block *block = nullptr;
  uint32_t number = 0;
};
inline thread_local Thread here;

// Symmetric memory as n ranks of one process see it.
class Team {
 public:
  // `space`: bytes in each pad behind the words of the channels.
  Team(int n, uint32_t channels, size_t space)
      : failed_(n), words_(lines_of(channels * n * sizeof(uint32_t))), channels_(channels) {
    for (int rank = 0; rank < n; ++rank) {
      lines_.emplace_back(words_ + lines_of(space));
      pads_.push_back(reinterpret_cast<uint32_t *>(lines_.back().data()));
    }
  }
  size_t space_at() const { return words_ * sizeof(phx::cuda::Line); }
  // blocks: one for each rank.
  phx_team of(int rank, void *const *blocks, size_t bytes) {
    const int32_t n = static_cast<int32_t>(pads_.size());
    return {sizeof(phx_team), rank, n, channels_, channels_, 0, blocks, pads_.data(), nullptr, bytes, failed_.data()};
  }
  void fail(int rank) { __atomic_store_n(&failed_[rank], 1, __ATOMIC_RELEASE); }

 private:
  static size_t lines_of(size_t bytes) { return (bytes + sizeof(phx::cuda::Line) - 1) / sizeof(phx::cuda::Line); }

  std::vector<int32_t> failed_;
  const size_t words_;  // in lines
  std::vector<std::vector<phx::cuda::Line>> lines_;
  std::vector<uint32_t *> pads_;
  const uint32_t channels_;
};

// Calls `kernel(rank)` in each thread of as many blocks on each rank of `ranks`; returns when all are through.
inline void run(const std::vector<int> &ranks, uint32_t blocks, uint32_t threads,
                const std::function<void(int)> &kernel) {
  std::vector<std::unique_ptr<Block>> all;
  std::vector<std::thread> running;
  for (const int rank : ranks)
    for (uint32_t number = 0; number < blocks; ++number) {
      all.push_back(std::make_unique<Block>(number, blocks, threads));
      for (uint32_t thread = 0; thread < threads; ++thread)
        running.emplace_back([&kernel, rank, thread, block = all.back().get()] {
          here = {block, thread};
          kernel(rank);
        });
    }
  for (std::thread &one : running) one.join();
}

}  // namespace host_blocks

namespace phx::cuda {

inline uint32_t thread_of_block() { return host_blocks::here.number; }
inline uint32_t threads_of_block() { return host_blocks::here.block->threads; }
inline uint32_t block_of_grid() { return host_blocks::here.block->number; }
inline uint32_t blocks_of_grid() { return host_blocks::here.block->blocks; }
inline void sync_block() { host_blocks::here.block->sync(); }

inline int32_t block_barrier(const phx_team *team, uint32_t channel, uint64_t timeout_ns) {
  host_blocks::Block &block = *host_blocks::here.block;
  block.sync();
  if (thread_of_block() == 0) block.met = phx_team_barrier(team, channel + block.number, timeout_ns);
  block.sync();
  return block.met;
}

inline int32_t from_first(int32_t value) {
  host_blocks::Block &block = *host_blocks::here.block;
  block.sync();
  if (thread_of_block() == 0) block.met = value;
  block.sync();
  return block.met;
}

}  // namespace phx::cuda
