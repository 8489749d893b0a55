// Structs of callers that were compiled with another version of phalanx.h, and what initializers give.
#include <cstddef>

#include "check.h"
#include "ranks.h"

namespace {

// A struct of a caller whose version has one more field.
template <class T>
struct Longer {
  T known;
  uint64_t unknown;
};
template <class T>
Longer<T> longer(const T &known, uint64_t unknown) {
  Longer<T> made{known, unknown};
  made.known.struct_size = sizeof made;
  return made;
}

struct Alone {
  Alone() {
    const phx_world_params params = PHX_WORLD_PARAMS_INIT;
    CHECK_OK(phx_world_create(&params, &world));
    const int32_t self = 0;
    CHECK_OK(phx_group_create(world, "me", &self, 1, 0, &group));
  }
  ~Alone() {
    phx_group_release(group);
    phx_world_release(world);
  }
  phx_world *world = nullptr;
  phx_group *group = nullptr;
};

}  // namespace

TEST(a_field_that_this_version_does_not_know_is_refused_unless_it_is_zero) {
  const Alone me;
  float x = 1;
  auto options = longer<phx_options>(PHX_OPTIONS_INIT, 0);
  const auto reduce = [&] {
    return phx_all_reduce(me.group, &x, &x, 1, PHX_DTYPE_F32, PHX_OP_SUM, &options.known, nullptr);
  };
  CHECK_OK(reduce());
  options.unknown = uint64_t{1} << 8;  // its second byte
  CHECK(offsetof(Longer<phx_options>, unknown) == 40);
  CHECK_FAILS(PHX_ERR_INVALID, "byte 41 of phx_options is 1", reduce());

  const auto params = longer<phx_world_params>(PHX_WORLD_PARAMS_INIT, 1);
  phx_world *world = nullptr;
  CHECK_FAILS(PHX_ERR_INVALID, "of phx_world_params", phx_world_create(&params.known, &world));
  const auto group_options = longer<phx_group_options>(PHX_GROUP_OPTIONS_INIT, 1);
  phx_group *group = nullptr;
  const int32_t self = 0;
  CHECK_FAILS(PHX_ERR_INVALID, "of phx_group_options",
              phx_group_create_with_options(me.world, "other", &self, 1, &group_options.known, 0, &group));
  const auto tuning = longer<phx_tuning>(PHX_TUNING_INIT, 1);
  CHECK_FAILS(PHX_ERR_INVALID, "of phx_tuning", phx_group_set_tuning(me.group, &tuning.known, 0));
  phx_store *store = nullptr;
  const auto ops = longer<phx_store_ops>(PHX_STORE_OPS_INIT, 1);
  CHECK_FAILS(PHX_ERR_INVALID, "of phx_store_ops", phx_store_wrap(&ops.known, nullptr, &store));
}

TEST(a_flag_that_a_call_does_not_keep_is_refused) {
  const Alone me;
  float x = 1, out = 0;
  void *block = nullptr;
  CHECK_OK(phx_mem_alloc(me.world, nullptr, 64, &block));
  phx_symm *symm = nullptr;
  CHECK_OK(phx_symm_rendezvous(me.group, block, 0, &symm));
  phx_options options = PHX_OPTIONS_INIT;
  const auto gather = [&](phx_work **work) {
    return phx_all_gather(me.group, &x, &out, 1, PHX_DTYPE_F32, &options, work);
  };
  options.flags = 6;
  CHECK_FAILS(PHX_ERR_INVALID, "options.flags is 0x6, and this call does not know 0x4", gather(nullptr));
  options.flags = PHX_OPTION_BUFFERED | PHX_OPTION_COMPARES_GRAPHS;
  phx_work *work = nullptr;
  CHECK_OK(gather(&work));
  CHECK_OK(phx_work_wait(work, 0));
  phx_work_release(work);
  CHECK(out == 1);
  CHECK_FAILS(PHX_ERR_INVALID, "does not know 0x1",
              phx_all_reduce(me.group, &x, &out, 1, PHX_DTYPE_F32, PHX_OP_SUM, &options, nullptr));
  options.flags = PHX_OPTION_BUFFERED;  // peers read the input where it lies
  CHECK_FAILS(PHX_ERR_INVALID, "does not know 0x2",
              phx_symm_all_reduce(symm, 0, block, 1, PHX_DTYPE_F32, PHX_OP_SUM, &options, nullptr));
  phx_symm_release(symm);
  CHECK_OK(phx_mem_free(me.world, block));
}

TEST(every_element_of_a_list_is_looked_at) {
  const Alone me;
  float x[2] = {1, 2};
  Longer<phx_call> calls[2] = {longer<phx_call>(PHX_CALL_INIT, 0), longer<phx_call>(PHX_CALL_INIT, 0)};
  for (int i = 0; i < 2; ++i) {
    calls[i].known.kind = PHX_CALL_ALL_REDUCE;
    calls[i].known.in = calls[i].known.out = &x[i];
    calls[i].known.count = 1;
    calls[i].known.dtype = PHX_DTYPE_F32;
    calls[i].known.op = PHX_OP_SUM;
  }
  CHECK_OK(phx_coalesced(me.group, &calls[0].known, 2, nullptr, nullptr));
  calls[1].unknown = 1;
  CHECK_FAILS(PHX_ERR_INVALID, "of phx_call", phx_coalesced(me.group, &calls[0].known, 2, nullptr, nullptr));
  auto message = longer<phx_message>(PHX_MESSAGE_INIT, 1);
  message.known.kind = PHX_MESSAGE_SEND;
  CHECK_FAILS(PHX_ERR_INVALID, "of phx_message", phx_messages(me.group, &message.known, 1, nullptr));
}

TEST(a_field_of_an_output_that_this_version_does_not_know_becomes_zero) {
  const Alone me;
  auto info = longer<phx_group_info>(PHX_GROUP_INFO_INIT, UINT64_MAX);
  CHECK_OK(phx_group_get_info(me.group, &info.known));
  CHECK(info.unknown == 0 && info.known.group_size == 1 && info.known.struct_size == sizeof info);
  CHECK(phx_send(nullptr, nullptr, 0, 0, 0, 0, nullptr, nullptr) == PHX_ERR_INVALID);
  auto error = longer<phx_error_info>(PHX_ERROR_INFO_INIT, UINT64_MAX);
  CHECK_OK(phx_last_error_info(&error.known));
  CHECK(error.unknown == 0 && error.known.status == PHX_ERR_INVALID);
}

TEST(a_shorter_struct_has_the_defaults_of_the_initializer) {
  const Alone me;
  float x = 2;
  phx_options options = PHX_OPTIONS_INIT;
  options.struct_size = offsetof(phx_options, scale);
  options.scale = 100;  // beyond the struct, as far as the library knows
  CHECK_OK(phx_all_reduce(me.group, &x, &x, 1, PHX_DTYPE_F32, PHX_OP_PREMUL_SUM, &options, nullptr));
  CHECK(x == 2);
}

TEST(the_strings_of_an_error_live_until_the_thread_asks_for_another) {
  CHECK(phx_send(nullptr, nullptr, 0, 0, 0, 0, nullptr, nullptr) == PHX_ERR_INVALID);
  phx_error_info first = PHX_ERROR_INFO_INIT, second = PHX_ERROR_INFO_INIT;
  CHECK_OK(phx_last_error_info(&first));
  CHECK(phx_recv(nullptr, nullptr, 0, 0, 0, 0, nullptr, nullptr) == PHX_ERR_INVALID);
  CHECK(std::strcmp(first.operation, "send") == 0);
  CHECK_OK(phx_last_error_info(&second));
  CHECK(std::strcmp(second.operation, "recv") == 0 && std::strlen(second.group) == 0);
}

TEST(a_barrier_may_be_started_and_has_a_channel) {
  ranks::as_threads(2, [](int rank, phx_world *world) {
    phx_group *group = ranks::make_group(world);
    CHECK(phx_group_rank(group) == rank && phx_group_size(group) == 2);
    phx_options options = PHX_OPTIONS_INIT;
    options.channel = 1;
    phx_work *work = nullptr;
    CHECK_OK(phx_barrier(group, &options, &work));
    CHECK_OK(phx_barrier(group, nullptr, nullptr));  // another channel, in between
    CHECK_OK(phx_work_wait(work, 0));
    phx_work_release(work);
    phx_group_release(group);
  });
  CHECK(phx_group_rank(nullptr) == -1 && phx_group_size(nullptr) == -1);
  CHECK(std::strcmp(phx_last_error(), "group_size: group is NULL") == 0);
}

int main(int argc, char **argv) { return check::run_all(argc, argv); }
