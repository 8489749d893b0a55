// The carrier of a world: the functions that move bytes to other hosts, and the endpoint that room net/ opens with
// them.
#pragma once

#include <memory>
#include <mutex>
#include <utility>

#include "base/error.h"
#include "base/progress.h"
#include "phalanx/carrier.h"
#include "world/allocator.h"

namespace phx {

using Carrier = Registered<phx_carrier_ops, &phx_carrier_ops::release>;
using CarrierRef = std::shared_ptr<Carrier>;

class CarrierSlot {
 public:
  // Makes the carrier of a world for which none was set. NULL, with the thread's error: there is none.
  using Maker = const phx_carrier_ops *(*)();
  void make_on_demand(Maker maker) { maker_ = maker; }
  // False: the endpoint is open already.
  bool set(CarrierRef carrier) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (endpoint_) return false;
    carrier_ = std::move(carrier);
    return true;
  }
  // The endpoint, which `open` makes if there is none.
  template <class Open>
  phx_status endpoint(Open open, std::shared_ptr<ProgressSource> *out) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!endpoint_) {
      if (!carrier_) {
        const phx_carrier_ops *const ops = maker_();
        if (ops == nullptr) return last_error().status;
        carrier_ = std::make_shared<Carrier>(*ops, nullptr);
      }
      PHX_TRY(open(carrier_, &endpoint_));
    }
    *out = endpoint_;
    return PHX_OK;
  }

 private:
  Maker maker_ = nullptr;
  std::mutex mutex_;  // also held while the endpoint is opened
  CarrierRef carrier_;
  std::shared_ptr<ProgressSource> endpoint_;
};

}  // namespace phx
