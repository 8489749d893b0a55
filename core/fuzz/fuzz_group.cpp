// A rank that makes a group, and uses it, with another that is faulty or hostile.
//
// The other one controls its record in the store, its side of the handshake, and everything that it sends: the payload
// and the descriptors of each parcel, revocations, messages that nobody asked for. It starts from what a good peer
// would say, which is what this rank says itself, and spoils it; also the memory that it shares may hold anything. Each
// call must end with a status of the header, within its time; what it hands out must be there; memory that was taken
// from the other must be as large as it has to be.
#include <memory>
#include <thread>

#include "base/error.h"
#include "peer.h"

using namespace phx;

namespace {

constexpr int64_t kTimeoutMs = 20, kLongMs = 60000;

class Hostile {
 public:
  Hostile(fuzz::Input &input, int32_t rank) : input_(input), rank_(rank), dials_(input.below(2) == 0) {
    uuid_ = random_uuid();
    uuid_.high = dials_ ? UINT64_MAX : 0;  // the larger one dials
    MUST(listen_abstract(socket_name(uuid_), &listener_) == PHX_OK);
  }
  ~Hostile() {
    shutdown(listener_.get(), SHUT_RDWR);
    if (thread_.joinable()) thread_.join();
  }
  Hostile(const Hostile &) = delete;

  void meet(const std::string &record) {
    if (record.size() == sizeof theirs_) std::memcpy(static_cast<void *>(&theirs_), record.data(), sizeof theirs_);
  }
  // Its record in the store. Once that was read, it is there.
  const std::string &record() {
    if (thread_.joinable()) return record_;
    PeerRecord mine = theirs_;
    mine.rank = rank_;
    mine.uuid = uuid_;
    record_ = fuzz::as_bytes(mine);
    fuzz::spoil(input_, &record_);
    thread_ = std::thread([this] { run(); });
    return record_;
  }

 private:
  void run() {
    const Fd socket = dials_ ? dial() : accept();
    if (!socket.valid()) return;
    pollfd entry{socket.get(), POLLIN, 0};
    for (;;) {
      while (poll(&entry, 1, -1) < 0) {
      }
      Message message;
      const Receive got = receive_message(socket.get(), &message);
      if (got == Receive::kNothing) continue;
      if (got != Receive::kMessage || !answer(socket.get(), message)) return;
    }
  }

  Fd dial() {
    Fd socket = fuzz::connect_to(theirs_.uuid);
    if (!socket.valid()) return socket;
    std::string hello = fuzz::as_bytes(Hello{kWireMagic, rank_, uuid_, theirs_.uuid, theirs_.token});
    fuzz::spoil(input_, &hello);
    Welcome welcome{};
    fuzz::send_raw(socket.get(), hello, {});
    if (fuzz::receive(socket.get(), &welcome, sizeof welcome) <= 0) socket.reset();
    return socket;
  }
  Fd accept() {
    pollfd entry{listener_.get(), POLLIN, 0};
    while (poll(&entry, 1, -1) < 0) {
    }
    Fd socket(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!socket.valid()) return socket;
    Hello hello{};
    fuzz::receive(socket.get(), &hello, sizeof hello);
    std::string welcome = fuzz::as_bytes(Welcome{kWireMagic, rank_, uuid_});
    fuzz::spoil(input_, &welcome);
    fuzz::send_raw(socket.get(), welcome, {});
    return socket;
  }

  // Says what it was told, unless the input has other plans.
  bool answer(int socket, const Message &heard) {
    const uint8_t how = input_.byte();
    if ((how & 0x80) != 0) intrude(socket, heard.envelope.group_id);
    if ((how & 0x60) == 0x60) return false;
    if (heard.envelope.kind != MessageKind::kExchange || (how & 0x20) != 0) return true;
    std::string payload = heard.payload;
    // The first parcel of a group is its geometry, in which everyone gives his group rank.
    if (heard.envelope.ordinal == 1 && payload.size() >= kRankAt + sizeof rank_)
      std::memcpy(&payload[kRankAt], &rank_, sizeof rank_);
    std::vector<Fd> made;
    std::vector<int> fds;
    for (const Fd &fd : heard.fds) fds.push_back(fd.get());
    if ((how & 1) != 0) fuzz::spoil(input_, &payload);
    if ((how & 2) != 0) replace(&fds, &made);
    Envelope envelope = heard.envelope;
    envelope.payload_bytes = static_cast<uint32_t>(payload.size());
    envelope.fd_count = static_cast<uint16_t>(fds.size());
    std::string bytes = fuzz::as_bytes(envelope);
    if ((how & 4) != 0) fuzz::spoil(input_, &bytes);
    for (int i = (how & 8) != 0 ? 2 : 1; i > 0; --i) fuzz::send_raw(socket, bytes + payload, fds);
    return true;
  }
  void replace(std::vector<int> *fds, std::vector<Fd> *made) {
    const uint8_t how = input_.byte();
    const off_t size = fds->empty() ? 4096 : lseek((*fds)[how % fds->size()], 0, SEEK_END);
    const auto kind = static_cast<fuzz::Memory>(how % static_cast<int>(fuzz::Memory::kKinds));
    fds->resize(std::min<size_t>(fds->size(), how >> 6));
    for (int count = how >> 4 & 3; count > 0; --count) {
      made->push_back(fuzz::make_memory(kind, static_cast<size_t>(std::max<off_t>(size, 2))));
      const std::string content = input_.bytes(input_.byte());
      (void)!pwrite(made->back().get(), content.data(), content.size(), 64 * input_.byte());
      fds->push_back(made->back().get());
    }
  }
  // Something that nobody asked for.
  void intrude(int socket, uint64_t group_id) {
    const auto kind = static_cast<MessageKind>(1 + input_.below(4));
    phx::ErrorInfo cause;
    cause.status = PHX_ERR_TIMEOUT;
    std::string payload = kind == MessageKind::kRevoke ? fuzz::as_bytes(cause) : input_.bytes(input_.byte());
    fuzz::spoil(input_, &payload);
    const Envelope envelope{kWireMagic, kind, 0, group_id, input_.byte(), static_cast<uint32_t>(payload.size()), 0};
    fuzz::send_raw(socket, fuzz::as_bytes(envelope) + payload, {});
  }

  static constexpr size_t kRankAt = 8;  // of the sender's group rank in its geometry

  fuzz::Input &input_;  // the thread's, once it runs
  const int32_t rank_;
  const bool dials_;
  Uuid uuid_;
  PeerRecord theirs_{};
  std::string record_;
  Fd listener_;
  std::thread thread_;
};

// A store in which the other rank's record is always there.
phx_status store_set(void *self, const char *, const void *value, size_t size) {
  static_cast<Hostile *>(self)->meet(std::string(static_cast<const char *>(value), size));
  return PHX_OK;
}
phx_status store_get(void *self, const char *, void *value, size_t capacity, size_t *size, int64_t) {
  const std::string &record = static_cast<Hostile *>(self)->record();
  std::memcpy(value, record.data(), std::min(capacity, record.size()));
  *size = record.size();
  return PHX_OK;
}
phx_status store_add(void *, const char *, int64_t delta, int64_t *result) {
  *result = delta;
  return PHX_OK;
}

phx_store *wrap(Hostile *hostile) {
  phx_store_ops ops{};
  ops.struct_size = sizeof ops;
  ops.set = store_set;
  ops.get = store_get;
  ops.add = store_add;
  phx_store *store = nullptr;
  MUST(phx_store_wrap(&ops, hostile, &store) == PHX_OK);
  return store;
}

phx_world *make_world(int32_t rank, phx_store *store, int64_t timeout_ms) {
  phx_world_params params{};
  params.struct_size = sizeof params;
  params.rank = rank;
  params.size = 2;
  params.store = store;
  params.timeout_ms = timeout_ms;
  params.staging_bytes = 256;
  params.signal_channels = 2;
  params.channels = 1;
  params.recorder_entries = 256;
  phx_world *world = nullptr;
  MUST(phx_world_create(&params, &world) == PHX_OK);
  return world;
}

bool ended_well(phx_status status, bool made) {
  MUST(status == PHX_OK ? made : fuzz::is_error(status) && !made);
  return made;
}
bool ended_well(phx_status status) { return ended_well(status, status == PHX_OK); }

// Both ends of every block and pad, whoever gave it.
void touch(phx_symm *symm) {
  phx_symm_info info{};
  info.struct_size = sizeof info;
  MUST(phx_symm_get_info(symm, &info) == PHX_OK);
  for (int32_t i = 0; i < info.group_size; ++i) {
    auto *block = static_cast<volatile char *>(phx_symm_buffer(symm, i));
    volatile uint32_t *pad = phx_symm_signal_pad(symm, i);
    MUST(block != nullptr && pad != nullptr);
    block[0] = block[info.size - 1] = 1;
    pad[info.signal_pad_bytes / sizeof *pad - 1] = 0;
  }
}

void rendezvous(phx_world *world, phx_group *group) {
  void *block = nullptr;
  MUST(phx_mem_alloc(world, nullptr, 8192, &block) == PHX_OK);
  phx_symm *symm = nullptr;
  if (ended_well(phx_symm_rendezvous(group, block, 0, &symm), symm != nullptr)) touch(symm);
  phx_symm_release(symm);
  MUST(phx_mem_free(world, block) == PHX_OK);
}

void set_tuning(phx_group *group) {
  phx_tuning tuning{sizeof tuning, 0, 256, 4096, 1 << 20, 64};
  if (!ended_well(phx_group_set_tuning(group, &tuning, 0))) return;
  MUST(phx_group_get_tuning(group, &tuning) == PHX_OK);
  MUST(tuning.chunk_bytes >= 4096 && tuning.push_bytes >= 64);
}

// The flight recorders of both, as JSON.
void dump(phx_world *world) {
  size_t size = 0;
  MUST(phx_world_dump(world, nullptr, 0, &size) == PHX_OK);
  std::string json(size + 1, '\0');
  MUST(phx_world_dump(world, &json[0], json.size(), &size) == PHX_OK);
}

// Uses a group in four ways that exchange something, and then in one through shared memory.
void use(phx_world *world, phx_group *group, uint32_t calls) {
  phx_group *made = nullptr;
  for (int i = 0; i < 4; ++i, calls >>= 4) {
    uint64_t bits = calls;
    uint8_t alive[2];
    switch (calls % 6) {
      case 0: set_tuning(group); break;
      case 1: rendezvous(world, group); break;
      case 2: ended_well(phx_group_agree(group, &bits, alive, 0)); break;
      case 3:
        if (made == nullptr) ended_well(phx_group_split(group, 1, 0, nullptr, 0, &made), made != nullptr);
        break;
      case 4:
        if (made == nullptr) ended_well(phx_group_shrink(group, nullptr, 0, &made), made != nullptr);
        break;
      default: dump(world);
    }
  }
  phx_options options = PHX_OPTIONS_INIT;
  options.timeout_ms = 1;
  for (phx_group *each : {group, made})
    if (each != nullptr) ended_well(phx_barrier(each, &options, nullptr));
  dump(world);
  phx_group_release(made);
}

// True when the group was made.
bool meet(const uint8_t *data, size_t size, int64_t timeout_ms) {
  fuzz::Input input(data, size);
  const auto calls = input.take<uint16_t>();
  const auto rank = static_cast<int32_t>(input.below(2));
  Hostile hostile(input, 1 - rank);
  phx_store *store = wrap(&hostile);
  phx_world *world = make_world(rank, store, timeout_ms);
  const int32_t both[] = {0, 1};
  phx_group *group = nullptr;
  const bool made = ended_well(phx_group_create(world, "all", both, 2, 0, &group), group != nullptr);
  if (made) use(world, group, calls);
  phx_group_release(group);
  phx_world_release(world);
  phx_store_release(store);
  return made;
}

}  // namespace

extern "C" int LLVMFuzzerInitialize(int *, char ***) {
  fuzz::log_into_nothing();
  setenv("PHALANX_TUNING", "/dev/null", 1);
  MUST(meet(nullptr, 0, kLongMs));  // who only says what he hears is a good member: else this target would test nothing
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  const int before = fuzz::open_descriptors();
  meet(data, size, kTimeoutMs);
  MUST(fuzz::open_descriptors() == before);
  return 0;
}
