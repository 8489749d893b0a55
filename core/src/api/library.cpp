// Functions that need no world: versions, names, sizes, errors, environment variables, the log and the interrupt hook.
#include <cstdlib>
#include <cstring>
#include <string>

#include "api/entry.h"
#include "base/build.h"
#include "base/environment.h"
#include "kernels/kernels.h"
#include "net/ucx.h"
#include "world/host_address.h"

using namespace phx;

namespace {

// From -1 down.
constexpr const char *kErrors[] = {
    "PHX_ERR_INVALID",   "PHX_ERR_UNSUPPORTED", "PHX_ERR_NO_MEMORY", "PHX_ERR_TIMEOUT",
    "PHX_ERR_PEER_DEAD", "PHX_ERR_REVOKED",     "PHX_ERR_MISMATCH",  "PHX_ERR_EXISTS",
    "PHX_ERR_NOT_FOUND", "PHX_ERR_IN_USE",      "PHX_ERR_SYSTEM",    "PHX_ERR_DEVICE",
    "PHX_ERR_ABI",       "PHX_ERR_PERMISSION",  "PHX_ERR_INTERNAL",  "PHX_ERR_INTERRUPTED"};
static_assert(sizeof kErrors / sizeof kErrors[0] == -PHX_ERR_INTERRUPTED);

struct Row {
  const char *name;
  size_t size;
};
constexpr Row kDtypes[] = {
    {"?", 0},      {"float16", 2}, {"bfloat16", 2},  {"float32", 4},     {"float64", 8},       {"int8", 1},
    {"uint8", 1},  {"int16", 2},   {"uint16", 2},    {"int32", 4},       {"uint32", 4},        {"int64", 8},
    {"uint64", 8}, {"bool", 1},    {"complex64", 8}, {"complex128", 16}, {"float8_e4m3fn", 1}, {"float8_e5m2", 1}};
constexpr const char *kOps[] = {"?", "sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum"};

#define PHX_ROW(type) {#type, sizeof(type)},
constexpr Row kStructs[] = {PHX_STRUCTS(PHX_ROW)};
#undef PHX_ROW

constexpr const char *kFeatures[] = {
    "cpu",        "store_memory", "store_file", "store_tcp", "memfd", "shrink", "recorder",
#ifdef PHX_CUDA
    "cuda",
#endif
#ifdef PHX_FAILPOINTS
    "failpoints",
#endif
};

const Row &dtype_row(int32_t dtype) {
  constexpr int32_t rows = sizeof kDtypes / sizeof kDtypes[0];
  return kDtypes[dtype > 0 && dtype < rows ? dtype : 0];
}

}  // namespace

extern "C" {

uint32_t phx_abi_version(void) { return PHX_ABI_VERSION; }

const char *phx_version(void) { return PHX_VERSION_STRING; }

const char *phx_build_info(void) {
  static const std::string *const info = new std::string([] {
    std::string features;
    for (const char *feature : kFeatures) features += (features.empty() ? "\"" : ", \"") + std::string(feature) + "\"";
    const Build &build = this_build();
    return "{\"version\": \"" PHX_VERSION_STRING "\", \"build\": \"" +
           std::string(build.fingerprint, sizeof build.fingerprint) +
           "\", \"compiler\": \"" __VERSION__ "\", \"isa\": \"" + std::string(kernels::active_isa()) +
           "\", \"features\": [" + features + "], \"cuda\": " + (phx_has("cuda") != 0 ? "true" : "false") + "}";
  }());  // never destroyed: it may be read during exit
  return info->c_str();
}

int32_t phx_has(const char *feature) {
  if (feature == nullptr) return 0;
  for (const char *known : kFeatures)
    if (std::strcmp(known, feature) == 0) return 1;
  return std::strcmp(kernels::active_isa(), feature) == 0 ? 1 : 0;
}

size_t phx_struct_size(const char *struct_name) {
  if (struct_name == nullptr) return 0;
  for (const Row &row : kStructs)
    if (std::strcmp(row.name, struct_name) == 0) return row.size;
  return 0;
}

const char *phx_status_name(phx_status status) {
  if (status == PHX_OK) return "PHX_OK";
  if (status == PHX_IN_PROGRESS) return "PHX_IN_PROGRESS";
  return status < 0 && status >= PHX_ERR_INTERRUPTED ? kErrors[-1 - status] : "unknown status";
}

const char *phx_dtype_name(phx_dtype dtype) { return dtype_row(dtype).name; }

size_t phx_dtype_size(phx_dtype dtype) { return dtype_row(dtype).size; }

const char *phx_op_name(phx_op op) {
  constexpr int32_t rows = sizeof kOps / sizeof kOps[0];
  return kOps[op > 0 && op < rows ? op : 0];
}

const char *phx_last_error(void) { return last_error().text; }

phx_status phx_last_error_info(phx_error_info *out) {
  const ErrorInfo info = last_error();  // copied, because a failing copy_error_out overwrites it
  return copy_error_out(info, out, "last_error_info");
}

phx_status phx_ucx_set_directory(const char *directory) {
  return guarded("ucx_set_directory", [&] { set_ucx_hint(directory); });
}

phx_status phx_ucx_describe(char *text, size_t capacity, size_t *size) {
  return guarded("ucx_describe", [&](const char *operation) -> phx_status {
    if (size == nullptr || (text == nullptr && capacity != 0))
      return fail(PHX_ERR_INVALID, operation, "size or text is NULL");
    const KeptError kept;
    const UcxFacts facts = ucx_facts();
    HostAddress address{};
    const char *const master = std::getenv("MASTER_ADDR");
    const bool chosen = choose_address(operation, master != nullptr ? master : "", &address) == PHX_OK;
    const std::string where = chosen ? text_of(address) : last_error().text;
    const std::string all = "path: " + facts.path + "\nversion: " + facts.version +
                            "\ntransports: " + facts.transports + "\nproblem: " + facts.problem +
                            "\naddress: " + (chosen ? where.substr(0, where.rfind(':')) : "") +
                            "\naddress problem: " + (chosen ? "" : where) + "\n";
    *size = all.size();
    if (capacity != 0) copy_text(text, capacity, all.c_str());
    return PHX_OK;
  });
}

phx_status phx_set_error(phx_status status, const char *text) {
  return fail_text(status, "carrier", "%s", text != nullptr ? text : phx_status_name(status));
}

const char *phx_environment(void) {
  static const std::string *const table = new std::string([] {
    std::string text;
    for (const Variable &row : kVariables)
      text += std::string(row.name) + '\t' + row.reader + '\t' + row.values + '\t' + row.fallback + '\t' + row.meaning +
              '\n';
    return text;
  }());  // never destroyed: it may be read during exit
  return table->c_str();
}

phx_status phx_set_log(phx_log_fn fn, void *user, int32_t min_level) {
  set_log(fn, user, min_level);
  return PHX_OK;
}

phx_status phx_set_interrupt(phx_interrupt_fn check, void *arg) {
  set_interrupt_hook(check, arg);
  return PHX_OK;
}
}
