#include "record.h"

#include <torch/csrc/distributed/c10d/ParamCommsUtils.hpp>

#include <tuple>
#include <type_traits>
#include <utility>

namespace phalanx {
namespace {

using Info = torch::ParamCommsDebugInfo;
using Splits = std::vector<int64_t>;

// Torch describes the ranks of a group by the first and the distance between them; -1 where they have none.
int stride_of(const std::vector<int64_t> &ranks) {
  if (ranks.size() < 2) return 1;
  const int64_t stride = ranks[1] - ranks[0];
  for (size_t i = 1; i < ranks.size(); ++i)
    if (ranks[i] - ranks[i - 1] != stride) return -1;
  return static_cast<int>(stride);
}

// Before torch 2.13 the description has no sequence number; the inputs of the event have it always.
template <class Given>
auto set_sequence(Given &info, int64_t sequence, bool message, int)
    -> decltype(info.setSequenceInfo(sequence, message)) {
  info.setSequenceInfo(sequence, message);
}
template <class Given>
void set_sequence(Given &, int64_t, bool, long) {}

template <class Made, class... Arguments>
std::shared_ptr<Made> make_info(bool async, Arguments &&...arguments) {
  if constexpr (std::is_constructible_v<Made, Arguments..., bool>)
    return std::make_shared<Made>(std::forward<Arguments>(arguments)..., async);
  else
    return std::make_shared<Made>(std::forward<Arguments>(arguments)...);
}

}  // namespace

struct Recording::Event {
  Event(const Members &members, Comms comms, int64_t sequence)
      : tensors(std::move(comms.inputs)),
        outer(innermost),
        info(describe(members, comms, comms.outputs.empty() ? *tensors : comms.outputs, sequence)),
        guard(c10::DebugInfoKind::PARAM_COMMS_INFO, info),
        function(at::RecordScope::FUNCTION) {
    innermost = this;
    if (!function.isActive()) return;
    const std::tuple<std::string, std::string> group{members.name, members.description};
    arguments = {c10::IValue(*tensors),
                 c10::IValue(std::make_tuple(sequence, comms.message)),
                 c10::IValue(group),
                 c10::IValue(int64_t{info->getRank()}),
                 c10::IValue(comms.name),
                 c10::IValue(comms.in_splits),
                 c10::IValue(comms.out_splits),
                 c10::IValue(int64_t{info->getGlobalRankStart()}),
                 c10::IValue(int64_t{info->getGlobalRankStride()}),
                 c10::IValue(int64_t{info->getWorldSize()}),
                 c10::IValue(comms.async)};
    function.before(at::kParamCommsCallName, c10::ArrayRef<const c10::IValue>(arguments.data(), arguments.size()));
    if (function.needsOutputs()) function.setOutputs(std::vector<c10::IValue>{c10::IValue(std::move(comms.outputs))});
  }
  ~Event() { innermost = outer; }

  static std::shared_ptr<Info> describe(const Members &members, const Comms &comms, const std::vector<at::Tensor> &some,
                                        int64_t sequence) {
    auto made = make_info<Info>(comms.async, std::tuple<std::string, std::string>{members.name, members.description},
                                static_cast<int>(comms.rank < 0 ? members.rank : comms.rank), std::string(comms.name),
                                comms.in_count, comms.out_count, some.empty() ? at::kByte : some.front().scalar_type(),
                                Splits(comms.in_splits), Splits(comms.out_splits),
                                members.ranks.empty() ? 0 : static_cast<int>(members.ranks.front()),
                                stride_of(members.ranks), static_cast<int>(members.ranks.size()));
    set_sequence(*made, sequence, comms.message, 0);
    return made;
  }

  static thread_local Event *innermost;

  const std::optional<std::vector<at::Tensor>> tensors;
  Event *const outer;
  const std::shared_ptr<Info> info;
  const c10::DebugInfoGuard guard;
  std::vector<c10::IValue> arguments;
  at::RecordFunction function;  // ends first
};

thread_local Recording::Event *Recording::Event::innermost = nullptr;

Recording::Recording(const Members &members, Comms comms, uint64_t sequence)
    : event_(std::make_shared<Event>(members, std::move(comms), static_cast<int64_t>(sequence))) {}

std::optional<std::vector<at::Tensor>> Recording::inputs() {
  return Event::innermost == nullptr ? std::nullopt : Event::innermost->tensors;
}

}  // namespace phalanx
