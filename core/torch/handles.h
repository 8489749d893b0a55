// Owners of what torch's stack holds: a kernel takes every argument into one of these before anything can throw.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "errors.h"
#include "torch_shim.h"

namespace phxt {

class Tensor {
 public:
  Tensor() = default;
  explicit Tensor(StableIValue owned) : handle_(reinterpret_cast<AtenTensorHandle>(owned)) {}
  explicit Tensor(AtenTensorHandle owned) : handle_(owned) {}
  Tensor(Tensor &&other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Tensor &operator=(Tensor &&other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~Tensor() {
    if (handle_) aoti_torch_delete_tensor_object(handle_);
  }

  explicit operator bool() const { return handle_ != nullptr; }
  AtenTensorHandle get() const { return handle_; }
  StableIValue release() { return reinterpret_cast<StableIValue>(std::exchange(handle_, nullptr)); }
  Tensor share() const {  // one more reference to the same tensor
    AtenTensorHandle copy = nullptr;
    check_torch(aoti_torch_new_tensor_handle(handle_, &copy), "share a tensor");
    return Tensor(copy);
  }

 private:
  AtenTensorHandle handle_ = nullptr;
};

class String {
 public:
  explicit String(StableIValue owned) : handle_(reinterpret_cast<StringHandle>(owned)) {}
  String(const String &) = delete;
  ~String() { torch_delete_string(handle_); }

  std::string_view view() const {
    const char *data = "";
    size_t size = 0;
    torch_string_c_str(handle_, &data);
    torch_string_length(handle_, &size);
    return {data, size};
  }

 private:
  StringHandle handle_;
};

class IntList {
 public:
  explicit IntList(StableIValue owned) : handle_(reinterpret_cast<StableListHandle>(owned)) {}
  IntList(const IntList &) = delete;
  ~IntList() {
    if (handle_) torch_delete_list(handle_);
  }

  size_t size() const {
    size_t result = 0;
    check_torch(torch_list_size(handle_, &result), "read a list");
    return result;
  }
  bool empty() const { return size() == 0; }
  std::vector<int64_t> values() const {
    std::vector<int64_t> result(size());
    for (size_t i = 0; i < result.size(); ++i) {
      StableIValue value = 0;
      check_torch(torch_list_get_item(handle_, i, &value), "read a list");
      result[i] = static_cast<int64_t>(value);
    }
    return result;
  }
  StableIValue release() { return reinterpret_cast<StableIValue>(std::exchange(handle_, nullptr)); }

 private:
  StableListHandle handle_;
};

class TensorList {
 public:
  explicit TensorList(std::vector<Tensor> tensors) : tensors_(std::move(tensors)) {}
  explicit TensorList(StableIValue owned) {
    const auto handle = reinterpret_cast<StableListHandle>(owned);
    size_t size = 0;
    AOTITorchError error = torch_list_size(handle, &size);
    for (size_t i = 0; error == 0 && i < size; ++i) {  // each item is owned by who takes it
      StableIValue item = 0;
      error = torch_list_get_item(handle, i, &item);
      if (error == 0) tensors_.emplace_back(item);
    }
    torch_delete_list(handle);
    check_torch(error, "read a list");
  }
  TensorList(const TensorList &) = delete;

  size_t size() const { return tensors_.size(); }
  const Tensor &operator[](size_t i) const { return tensors_[i]; }
  StableIValue release() {
    StableListHandle handle = nullptr;
    check_torch(torch_new_list_reserve_size(tensors_.size(), &handle), "make a list");
    for (Tensor &tensor : tensors_) check_torch(torch_list_push_back(handle, tensor.release()), "make a list");
    tensors_.clear();
    return reinterpret_cast<StableIValue>(handle);
  }

 private:
  std::vector<Tensor> tensors_;
};

}  // namespace phxt
