/* Frozen by core/abi/abi.py: the layout of every public struct where pointers have 64 bits. Compiled, never
 * run. A line here may only be added. If one fails, the header broke the ABI. */
#include <stddef.h>

#include "phalanx/phalanx.h"

#ifdef __cplusplus
#define PHX_FROZEN(fact) static_assert(fact, #fact)
#else
#define PHX_FROZEN(fact) _Static_assert(fact, #fact)
#endif

PHX_FROZEN(sizeof(phx_allocator_ops) == 64);
PHX_FROZEN(offsetof(phx_allocator_ops, struct_size) == 0);
PHX_FROZEN(offsetof(phx_allocator_ops, flags) == 4);
PHX_FROZEN(offsetof(phx_allocator_ops, name) == 8);
PHX_FROZEN(offsetof(phx_allocator_ops, alloc) == 16);
PHX_FROZEN(offsetof(phx_allocator_ops, free) == 24);
PHX_FROZEN(offsetof(phx_allocator_ops, export_handle) == 32);
PHX_FROZEN(offsetof(phx_allocator_ops, import_handle) == 40);
PHX_FROZEN(offsetof(phx_allocator_ops, unmap) == 48);
PHX_FROZEN(offsetof(phx_allocator_ops, destroy) == 56);

PHX_FROZEN(sizeof(phx_block) == 32);
PHX_FROZEN(offsetof(phx_block, data) == 0);
PHX_FROZEN(offsetof(phx_block, count) == 8);
PHX_FROZEN(offsetof(phx_block, row) == 16);
PHX_FROZEN(offsetof(phx_block, stride) == 24);

PHX_FROZEN(sizeof(phx_call) == 48);
PHX_FROZEN(offsetof(phx_call, struct_size) == 0);
PHX_FROZEN(offsetof(phx_call, kind) == 4);
PHX_FROZEN(offsetof(phx_call, in) == 8);
PHX_FROZEN(offsetof(phx_call, out) == 16);
PHX_FROZEN(offsetof(phx_call, count) == 24);
PHX_FROZEN(offsetof(phx_call, dtype) == 32);
PHX_FROZEN(offsetof(phx_call, op) == 36);
PHX_FROZEN(offsetof(phx_call, root_group_rank) == 40);
PHX_FROZEN(offsetof(phx_call, flags) == 44);

PHX_FROZEN(sizeof(phx_device) == 8);
PHX_FROZEN(offsetof(phx_device, type) == 0);
PHX_FROZEN(offsetof(phx_device, index) == 4);

PHX_FROZEN(sizeof(phx_error_info) == 56);
PHX_FROZEN(offsetof(phx_error_info, struct_size) == 0);
PHX_FROZEN(offsetof(phx_error_info, status) == 4);
PHX_FROZEN(offsetof(phx_error_info, rank) == 8);
PHX_FROZEN(offsetof(phx_error_info, peer) == 12);
PHX_FROZEN(offsetof(phx_error_info, sequence) == 16);
PHX_FROZEN(offsetof(phx_error_info, step) == 24);
PHX_FROZEN(offsetof(phx_error_info, sys_errno) == 28);
PHX_FROZEN(offsetof(phx_error_info, operation) == 32);
PHX_FROZEN(offsetof(phx_error_info, group) == 40);
PHX_FROZEN(offsetof(phx_error_info, text) == 48);

PHX_FROZEN(sizeof(phx_group_info) == 64);
PHX_FROZEN(offsetof(phx_group_info, struct_size) == 0);
PHX_FROZEN(offsetof(phx_group_info, group_rank) == 4);
PHX_FROZEN(offsetof(phx_group_info, group_size) == 8);
PHX_FROZEN(offsetof(phx_group_info, state) == 12);
PHX_FROZEN(offsetof(phx_group_info, id) == 16);
PHX_FROZEN(offsetof(phx_group_info, sequence) == 24);
PHX_FROZEN(offsetof(phx_group_info, name) == 32);
PHX_FROZEN(offsetof(phx_group_info, ranks) == 40);
PHX_FROZEN(offsetof(phx_group_info, channels) == 48);
PHX_FROZEN(offsetof(phx_group_info, hosts) == 52);
PHX_FROZEN(offsetof(phx_group_info, reduction_order) == 56);
PHX_FROZEN(offsetof(phx_group_info, reserved) == 60);

PHX_FROZEN(sizeof(phx_group_options) == 8);
PHX_FROZEN(offsetof(phx_group_options, struct_size) == 0);
PHX_FROZEN(offsetof(phx_group_options, reduction_order) == 4);

PHX_FROZEN(sizeof(phx_mem_info) == 48);
PHX_FROZEN(offsetof(phx_mem_info, struct_size) == 0);
PHX_FROZEN(offsetof(phx_mem_info, live) == 4);
PHX_FROZEN(offsetof(phx_mem_info, base) == 8);
PHX_FROZEN(offsetof(phx_mem_info, size) == 16);
PHX_FROZEN(offsetof(phx_mem_info, alloc_id) == 24);
PHX_FROZEN(offsetof(phx_mem_info, persistent) == 32);
PHX_FROZEN(offsetof(phx_mem_info, reserved) == 36);
PHX_FROZEN(offsetof(phx_mem_info, device) == 40);

PHX_FROZEN(sizeof(phx_message) == 40);
PHX_FROZEN(offsetof(phx_message, struct_size) == 0);
PHX_FROZEN(offsetof(phx_message, kind) == 4);
PHX_FROZEN(offsetof(phx_message, buffer) == 8);
PHX_FROZEN(offsetof(phx_message, count) == 16);
PHX_FROZEN(offsetof(phx_message, dtype) == 24);
PHX_FROZEN(offsetof(phx_message, peer_group_rank) == 28);
PHX_FROZEN(offsetof(phx_message, tag) == 32);
PHX_FROZEN(offsetof(phx_message, flags) == 36);

PHX_FROZEN(sizeof(phx_options) == 40);
PHX_FROZEN(offsetof(phx_options, struct_size) == 0);
PHX_FROZEN(offsetof(phx_options, flags) == 4);
PHX_FROZEN(offsetof(phx_options, algo) == 8);
PHX_FROZEN(offsetof(phx_options, channel) == 12);
PHX_FROZEN(offsetof(phx_options, timeout_ms) == 16);
PHX_FROZEN(offsetof(phx_options, scale) == 24);
PHX_FROZEN(offsetof(phx_options, gpu) == 32);

PHX_FROZEN(sizeof(phx_store_ops) == 56);
PHX_FROZEN(offsetof(phx_store_ops, struct_size) == 0);
PHX_FROZEN(offsetof(phx_store_ops, flags) == 4);
PHX_FROZEN(offsetof(phx_store_ops, set) == 8);
PHX_FROZEN(offsetof(phx_store_ops, get) == 16);
PHX_FROZEN(offsetof(phx_store_ops, add) == 24);
PHX_FROZEN(offsetof(phx_store_ops, wait) == 32);
PHX_FROZEN(offsetof(phx_store_ops, remove) == 40);
PHX_FROZEN(offsetof(phx_store_ops, destroy) == 48);

PHX_FROZEN(sizeof(phx_symm_info) == 64);
PHX_FROZEN(offsetof(phx_symm_info, struct_size) == 0);
PHX_FROZEN(offsetof(phx_symm_info, group_rank) == 4);
PHX_FROZEN(offsetof(phx_symm_info, group_size) == 8);
PHX_FROZEN(offsetof(phx_symm_info, signal_channels) == 12);
PHX_FROZEN(offsetof(phx_symm_info, base) == 16);
PHX_FROZEN(offsetof(phx_symm_info, size) == 24);
PHX_FROZEN(offsetof(phx_symm_info, signal_pad_bytes) == 32);
PHX_FROZEN(offsetof(phx_symm_info, device) == 40);
PHX_FROZEN(offsetof(phx_symm_info, group) == 48);
PHX_FROZEN(offsetof(phx_symm_info, pad_stride) == 56);
PHX_FROZEN(offsetof(phx_symm_info, reserved) == 60);

PHX_FROZEN(sizeof(phx_team) == 64);
PHX_FROZEN(offsetof(phx_team, struct_size) == 0);
PHX_FROZEN(offsetof(phx_team, group_rank) == 4);
PHX_FROZEN(offsetof(phx_team, group_size) == 8);
PHX_FROZEN(offsetof(phx_team, channels) == 12);
PHX_FROZEN(offsetof(phx_team, pad_stride) == 16);
PHX_FROZEN(offsetof(phx_team, reserved) == 20);
PHX_FROZEN(offsetof(phx_team, buffers) == 24);
PHX_FROZEN(offsetof(phx_team, pads) == 32);
PHX_FROZEN(offsetof(phx_team, multicast) == 40);
PHX_FROZEN(offsetof(phx_team, bytes) == 48);
PHX_FROZEN(offsetof(phx_team, failed) == 56);

PHX_FROZEN(sizeof(phx_world_params) == 72);
PHX_FROZEN(offsetof(phx_world_params, struct_size) == 0);
PHX_FROZEN(offsetof(phx_world_params, flags) == 4);
PHX_FROZEN(offsetof(phx_world_params, rank) == 8);
PHX_FROZEN(offsetof(phx_world_params, size) == 12);
PHX_FROZEN(offsetof(phx_world_params, store) == 16);
PHX_FROZEN(offsetof(phx_world_params, timeout_ms) == 24);
PHX_FROZEN(offsetof(phx_world_params, host_id) == 32);
PHX_FROZEN(offsetof(phx_world_params, staging_bytes) == 40);
PHX_FROZEN(offsetof(phx_world_params, signal_channels) == 48);
PHX_FROZEN(offsetof(phx_world_params, channels) == 52);
PHX_FROZEN(offsetof(phx_world_params, recorder_entries) == 56);
PHX_FROZEN(offsetof(phx_world_params, reserved) == 60);
PHX_FROZEN(offsetof(phx_world_params, job) == 64);
