// One-sided communication: torch 2.14's windows on symmetric memory of the core.
#pragma once

#include "backend.h"

#ifdef C10D_BACKEND_HAS_WINDOW
#include <torch/csrc/distributed/c10d/Window.hpp>

#include <deque>

namespace phalanx {

// A tensor of each rank in which the others write. `put` counts a signal for its target, as torch's window of NCCL
// does; `signal` counts one more, and `wait_signal` takes one. Each window has signals of its own.
class Window final : public c10d::Window {
 public:
  explicit Window(c10::intrusive_ptr<Backend> backend);  // collective

  void tensor_register(const at::Tensor &tensor, bool owning) override;
  void tensor_deregister() override;
  C10dWork put(const at::Tensor &tensor, int64_t rank, int64_t offset, bool async,
               const c10d::PutOptions &opts) override;
  at::Tensor map_remote_tensor(int64_t rank) override;
  C10dWork signal(int64_t rank, bool async, const c10d::SignalOptions &opts) override;
  C10dWork wait_signal(int64_t rank, bool async, const c10d::WaitSignalOptions &opts) override;
  c10d::WindowAttr get_attr(int64_t rank) override;

 private:
  class Wait;
  const at::Tensor &part(int64_t rank, const char *what) const;  // what a rank registered, as it is mapped here
  void check_rank(int64_t rank, const char *what) const;
  void count(int64_t rank, const char *what) const;  // one signal for a rank
  bool has_signal(int rank) const;
  void take(int rank, Milliseconds timeout);

  const c10::intrusive_ptr<Backend> backend_;
  const std::shared_ptr<Engine> engine_;
  const int rank_, size_;
  std::shared_ptr<phx_symm> pads_;  // a block for its signal pads alone
  uint32_t pad_stride_ = 0;
  std::deque<std::atomic<uint32_t>> taken_;  // how many signals of each rank were waited for
  std::vector<at::Tensor> parts_;
  std::optional<at::Tensor> kept_;
};

}  // namespace phalanx
#endif
