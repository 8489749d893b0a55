// What goes wrong with messages is named: wrong arguments, ranks that disagree, stay away, die or leave.
#include <signal.h>

#include <vector>

#include "messages.h"

namespace {

using messages::expect;
using messages::last_info;
using messages::letters;
using messages::says;
using messages::send;
using messages::start_recv;
using messages::start_send;
using messages::within;

TEST(wrong_arguments_of_messages_fail_before_anything_is_sent) {
  ranks::as_threads(2, [](int rank, phx_world *world) {
    phx_group *group = ranks::make_group(world);
    float a[8] = {};
    phx_work *work = nullptr;
    CHECK_FAILS(PHX_ERR_INVALID, "group is NULL", phx_send(nullptr, a, 8, PHX_DTYPE_F32, 0, 1, nullptr, nullptr));
    CHECK_FAILS(PHX_ERR_INVALID, "group is NULL", phx_recv(nullptr, a, 8, PHX_DTYPE_F32, 0, 1, nullptr, &work));
    CHECK_FAILS(PHX_ERR_INVALID, "peer is 2, which is not a group rank: the group has 2 ranks",
                phx_send(group, a, 8, PHX_DTYPE_F32, 2, 1, nullptr, nullptr));
    CHECK_FAILS(PHX_ERR_INVALID, "peer is -2, which is not a group rank",
                phx_recv(group, a, 8, PHX_DTYPE_F32, -2, 1, nullptr, nullptr));
    CHECK_FAILS(PHX_ERR_INVALID, "is allowed for receives only",
                phx_send(group, a, 8, PHX_DTYPE_F32, PHX_ANY_RANK, 1, nullptr, nullptr));
    CHECK_FAILS(PHX_ERR_INVALID, "buffer is NULL, but count",
                phx_send(group, nullptr, 8, PHX_DTYPE_F32, 1 - rank, 1, nullptr, nullptr));
    CHECK_FAILS(PHX_ERR_INVALID, "buffer is NULL, but count",
                phx_recv(group, nullptr, 8, PHX_DTYPE_F32, 1 - rank, 1, nullptr, &work));
    CHECK_FAILS(PHX_ERR_INVALID, "unknown dtype 99", phx_send(group, a, 8, 99, 1 - rank, 1, nullptr, nullptr));
    CHECK_FAILS(PHX_ERR_INVALID, "more than memory",
                phx_recv(group, a, SIZE_MAX / 2, PHX_DTYPE_F32, 1 - rank, 1, nullptr, nullptr));
    phx_options options = within(-5);
    CHECK_FAILS(PHX_ERR_INVALID, "timeout_ms is -5",
                phx_send(group, a, 8, PHX_DTYPE_F32, 1 - rank, 1, &options, nullptr));
    options = within(0);
    options.flags = 1;
    CHECK_FAILS(PHX_ERR_INVALID, "flags must be 0", phx_recv(group, a, 8, PHX_DTYPE_F32, 1 - rank, 1, &options, &work));
    options.struct_size = 3;
    CHECK_FAILS(PHX_ERR_ABI, "struct_size", phx_send(group, a, 8, PHX_DTYPE_F32, 1 - rank, 1, &options, nullptr));
    CHECK(last_info().rank == rank);
    CHECK(work == nullptr);
    a[0] = 3;  // the group has not noticed any of it
    CHECK_OK(phx_send(group, a, 8, PHX_DTYPE_F32, 1 - rank, 1, nullptr, nullptr));
    a[0] = 0;
    CHECK_OK(phx_recv(group, a, 8, PHX_DTYPE_F32, 1 - rank, 1, nullptr, nullptr));
    CHECK(a[0] == 3);
    phx_group_release(group);
  });
}

TEST(a_send_and_its_receive_that_disagree_are_told_both_calls) {
  ranks::as_threads(2, [](int rank, phx_world *world) {
    for (bool kept : {false, true}) {  // whether the message came before its receive
      phx_group *group = ranks::make_group(world);
      std::vector<double> large(1 << 20);
      float a[16] = {};
      const char *sent = kept ? "send(float32, 3, tag 6)" : "send(float64, 1048576, tag 5)";
      if (rank == 0) {
        if (kept) {
          CHECK_OK(phx_send(group, a, 3, PHX_DTYPE_F32, 1, 6, nullptr, nullptr));
          CHECK_OK(phx_send(group, a, 4, PHX_DTYPE_F32, 1, 7, nullptr, nullptr));
        }
        CHECK_FAILS(PHX_ERR_MISMATCH, sent,
                    phx_send(group, large.data(), large.size(), PHX_DTYPE_F64, 1, 5, nullptr, nullptr));
        CHECK_FAILS(PHX_ERR_REVOKED, "same dtype and count",
                    phx_send(group, a, 1, PHX_DTYPE_F32, 1, 5, nullptr, nullptr));
      } else {
        if (kept) CHECK_OK(phx_recv(group, a, 4, PHX_DTYPE_F32, 0, 7, nullptr, nullptr));
        const uint32_t tag = kept ? 6 : 5;
        phx_work *work = nullptr;
        CHECK_OK(phx_recv(group, a, 16, PHX_DTYPE_F32, 0, tag, nullptr, &work));
        CHECK_FAILS(PHX_ERR_MISMATCH, sent, phx_work_wait(work, 0));
        CHECK(says(kept ? "recv(float32, 16, tag 6)" : "recv(float32, 16, tag 5)") && says("rank 0 (pid"));
        phx_error_info error{};
        error.struct_size = sizeof error;
        CHECK_OK(phx_work_get_error(work, &error));
        CHECK(error.status == PHX_ERR_MISMATCH && error.rank == 1 && error.peer == 0);
        CHECK(std::strcmp(error.operation, "recv") == 0 && std::strcmp(error.group, "all") == 0);
        phx_work_release(work);
      }
      CHECK_FAILS(PHX_ERR_REVOKED, "revoked by an earlier failure", phx_barrier(group, nullptr, nullptr));
      phx_group_release(group);
    }
  });
}

TEST(a_message_to_itself_must_agree_as_well) {
  ranks::as_threads(1, [](int, phx_world *world) {
    phx_group *group = ranks::make_group(world);
    int32_t x = 1;
    CHECK_OK(phx_send(group, &x, 1, PHX_DTYPE_I32, 0, 1, nullptr, nullptr));
    CHECK_FAILS(PHX_ERR_MISMATCH, "recv(float32, 1, tag 1)",
                phx_recv(group, &x, 1, PHX_DTYPE_F32, 0, 1, nullptr, nullptr));
    phx_group_release(group);
    group = ranks::make_group(world);
    phx_work *work = nullptr;
    CHECK_OK(phx_recv(group, &x, 1, PHX_DTYPE_F32, 0, 1, nullptr, &work));
    CHECK_FAILS(PHX_ERR_MISMATCH, "recv(float32, 1, tag 1)",
                phx_send(group, &x, 1, PHX_DTYPE_I32, 0, 1, nullptr, nullptr));
    CHECK_FAILS(PHX_ERR_MISMATCH, "send(int32, 1, tag 1)", phx_work_wait(work, 0));
    phx_work_release(work);
    phx_group_release(group);
  });
}

TEST(a_message_that_never_comes_is_named_at_the_deadline) {
  ranks::as_threads(2, [](int rank, phx_world *world) {
    for (int32_t from : {1, -1 /* PHX_ANY_RANK */}) {
      phx_group *group = ranks::make_group(world);
      int16_t x[5] = {}, y = 0;
      const phx_options options = within(50);
      if (rank == 1) CHECK_OK(phx_send(group, &y, 1, PHX_DTYPE_I16, 0, 8, nullptr, nullptr));
      CHECK_OK(phx_barrier(group, nullptr, nullptr));
      if (rank == 0) {
        CHECK_FAILS(PHX_ERR_TIMEOUT, "timed out after 50 ms (the timeout_ms of this call): rank 0 still waits for",
                    phx_recv(group, x, 5, PHX_DTYPE_I16, from, 9, &options, nullptr));
        CHECK(says("recv(int16, 5, tag 9)") && says("send(int16, 1, tag 8) from rank 1"));
        CHECK(says(from == 1 ? "rank 1 (pid" : "any rank"));
        CHECK(last_info().peer == from && std::strcmp(last_info().operation, "recv") == 0);
        CHECK_FAILS(PHX_ERR_REVOKED, "tag 9", phx_recv(group, x, 5, PHX_DTYPE_I16, from, 9, nullptr, nullptr));
      } else {
        CHECK_FAILS(PHX_ERR_TIMEOUT, "recv(int16, 5, tag 9)",  // told by rank 0
                    phx_recv(group, x, 5, PHX_DTYPE_I16, 0, 7, nullptr, nullptr));
      }
      phx_group_release(group);
    }
  });
}

TEST(a_message_that_is_never_received_is_named_at_the_deadline) {
  ranks::as_threads(2, [](int rank, phx_world *world) {
    phx_group *group = ranks::make_group(world);
    std::vector<char> large(size_t{4} << 20);
    if (rank == 0) {
      phx_work *work = start_send(group, 1, 3, large);
      CHECK_FAILS(PHX_ERR_TIMEOUT, "send(uint8, 4194304, tag 3)", phx_work_wait(work, 50));
      CHECK(says("rank 1 (pid") && says("of 4194304 bytes"));
      CHECK_FAILS(PHX_ERR_TIMEOUT, "tag 3", phx_work_wait(work, 50));  // final
      phx_work_release(work);
    } else {
      while (phx_world_check(world) == PHX_OK) std::this_thread::yield();
      CHECK_FAILS(PHX_ERR_TIMEOUT, "send(uint8, 4194304, tag 3)",
                  phx_recv(group, large.data(), large.size(), PHX_DTYPE_U8, 0, 3, nullptr, nullptr));
    }
    phx_group_release(group);
  });
}

TEST(a_peer_that_is_killed_ends_every_send_and_receive) {
  const std::vector<int> codes = ranks::as_processes(3, [](int rank, phx_world *world) {
    phx_group *group = ranks::make_group(world);
    int32_t pid = getpid(), pids[3] = {};
    CHECK_OK(phx_all_gather(group, &pid, pids, 1, PHX_DTYPE_I32, nullptr, nullptr));
    std::vector<char> large(size_t{4} << 20), out(100);
    const std::string expected = "rank 2 (pid " + std::to_string(pids[2]) + ") died";
    if (rank == 2) {
      CHECK_OK(phx_barrier(group, nullptr, nullptr));
      raise(SIGKILL);
    }
    phx_work *works[] = {start_send(group, 2, 2, large), start_recv(group, 2, 3, out),
                         start_recv(group, PHX_ANY_RANK, 4, out), start_recv(group, 1 - rank, 5, out)};
    CHECK_OK(phx_barrier(group, nullptr, nullptr));
    for (phx_work *work : works) {
      CHECK_FAILS(PHX_ERR_PEER_DEAD, expected.c_str(), phx_work_wait(work, 0));
      CHECK(last_info().peer == 2);
      phx_work_release(work);
    }
    CHECK_FAILS(PHX_ERR_REVOKED, "died", phx_recv(group, out.data(), 1, PHX_DTYPE_U8, 2, 1, nullptr, nullptr));
    phx_group_release(group);
  });
  CHECK(codes[0] == 0 && codes[1] == 0);
  CHECK(WIFSIGNALED(codes[2]) && WTERMSIG(codes[2]) == SIGKILL);
}

TEST(what_a_rank_sent_before_it_left_can_be_received_and_no_more) {
  ranks::as_threads(3, [](int rank, phx_world *world) {
    phx_group *group = ranks::make_group(world);
    const std::vector<char> unfinished(size_t{4} << 20);
    std::vector<char> out(10);
    if (rank == 1) {
      send(group, 0, 1, letters(1, 100));
      send(group, 0, 2, letters(2, 1000));
      phx_work_release(start_send(group, 0, 3, unfinished));
      CHECK_OK(phx_world_finalize(world));
    } else {
      while (phx_world_check(world) == PHX_OK) std::this_thread::yield();
      CHECK(says("has left"));
      if (rank == 0) {
        expect(group, 1, 2, 2, 1000);
        expect(group, PHX_ANY_RANK, 1, 1, 100);
        std::vector<char> large(unfinished.size());
        CHECK_FAILS(PHX_ERR_PEER_DEAD, "rank 1",
                    phx_recv(group, large.data(), large.size(), PHX_DTYPE_U8, 1, 3, nullptr, nullptr));
        CHECK(says("has left"));
        CHECK_FAILS(PHX_ERR_PEER_DEAD, "has left",
                    phx_send(group, out.data(), 10, PHX_DTYPE_U8, 1, 9, nullptr, nullptr));
      }
      // The two that are left still talk to each other.
      send(group, 2 - rank, 4, letters(4, 100000));
      expect(group, PHX_ANY_RANK, 4, 4, 100000);
    }
    phx_group_release(group);
  });
}

TEST(a_receive_from_any_rank_ends_when_everybody_has_left_and_each_is_named) {
  ranks::as_threads(3, [](int rank, phx_world *world) {
    phx_group *group = ranks::make_group(world);
    char x = 0;
    if (rank == 0) {
      CHECK_FAILS(PHX_ERR_PEER_DEAD, "has left",
                  phx_recv(group, &x, 1, PHX_DTYPE_U8, PHX_ANY_RANK, 1, nullptr, nullptr));
      for (int peer : {1, 2}) {
        const std::string name = "rank " + std::to_string(peer) + " (pid";
        CHECK_FAILS(PHX_ERR_PEER_DEAD, name.c_str(), phx_recv(group, &x, 1, PHX_DTYPE_U8, peer, 1, nullptr, nullptr));
        CHECK(last_info().peer == peer && says("has left"));
        CHECK_FAILS(PHX_ERR_PEER_DEAD, name.c_str(), phx_send(group, &x, 1, PHX_DTYPE_U8, peer, 1, nullptr, nullptr));
        CHECK(last_info().peer == peer && says("has left"));
      }
    } else {
      CHECK_OK(phx_world_finalize(world));
    }
    phx_group_release(group);
  });
}

TEST(revoke_ends_messages_that_wait_and_those_that_were_started) {
  ranks::as_threads(2, [](int rank, phx_world *world) {
    phx_group *group = ranks::make_group(world);
    std::vector<char> out(10), large(size_t{4} << 20);
    if (rank == 0) {
      phx_work *receive = start_recv(group, 1, 2, out), *work = start_send(group, 1, 2, large);
      CHECK_OK(phx_barrier(group, nullptr, nullptr));
      CHECK_FAILS(PHX_ERR_REVOKED, "rank 1 revoked it: enough",
                  phx_recv(group, out.data(), 10, PHX_DTYPE_U8, 1, 1, nullptr, nullptr));
      CHECK_FAILS(PHX_ERR_REVOKED, "enough", phx_work_wait(receive, 0));
      CHECK_FAILS(PHX_ERR_REVOKED, "enough", phx_work_wait(work, 0));
      CHECK_FAILS(PHX_ERR_REVOKED, "enough", phx_work_test(work));
      phx_work_release(receive);
      phx_work_release(work);
    } else {
      CHECK_OK(phx_barrier(group, nullptr, nullptr));
      CHECK_OK(phx_group_revoke(group, "enough"));
      CHECK_FAILS(PHX_ERR_REVOKED, "enough", phx_send(group, out.data(), 10, PHX_DTYPE_U8, 0, 1, nullptr, nullptr));
    }
    phx_group_release(group);
  });
}

}  // namespace

int main(int argc, char **argv) { return check::run_all(argc, argv); }
