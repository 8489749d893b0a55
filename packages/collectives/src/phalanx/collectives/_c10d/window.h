// One-sided communication: torch 2.14's windows, which are those of the core.
#pragma once

#include "backend.h"

#ifdef C10D_BACKEND_HAS_WINDOW
#include <torch/csrc/distributed/c10d/Window.hpp>

#include <memory>
#include <vector>

namespace phalanx {

// A tensor of each rank in which the others write. `put` counts a signal for its target, as torch's window of NCCL
// does; `signal` counts one more, and `wait_signal` takes one. Each window has signals of its own.
class Window final : public c10d::Window {
 public:
  explicit Window(c10::intrusive_ptr<Backend> backend);

  void tensor_register(const at::Tensor &tensor, bool owning) override;
  void tensor_deregister() override;
  C10dWork put(const at::Tensor &tensor, int64_t rank, int64_t offset, bool async,
               const c10d::PutOptions &opts) override;
  at::Tensor map_remote_tensor(int64_t rank) override;
  C10dWork signal(int64_t rank, bool async, const c10d::SignalOptions &opts) override;
  C10dWork wait_signal(int64_t rank, bool async, const c10d::WaitSignalOptions &opts) override;
  c10d::WindowAttr get_attr(int64_t rank) override;
  // What map_remote_tensor is for on one host, between any: copies elements from `offset` on into `out`.
  void get(const at::Tensor &out, int64_t rank, int64_t offset);

 private:
  using Handle = std::shared_ptr<phx_window>;
  class Wait;
  struct Part {  // what a rank has registered
    at::ScalarType dtype;
    std::vector<int64_t> sizes;
    int64_t count;      // of elements
    at::Tensor mapped;  // undefined for a rank of another host
  };
  const Part &part(int64_t rank, const char *what) const;
  void check_rank(int64_t rank, const char *what) const;
  // That elements of a tensor, which is on the CPU, fit into the part of a rank.
  void check_fits(const at::Tensor &tensor, int64_t rank, int64_t offset, const char *what) const;
  void check(phx_status status, const char *what) const;

  const c10::intrusive_ptr<Backend> backend_;
  const std::shared_ptr<Engine> engine_;
  const int size_;
  Handle window_;
  std::vector<Part> parts_;
  std::optional<at::Tensor> kept_;
};

}  // namespace phalanx
#endif
