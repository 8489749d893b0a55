// The operands of a fused product and their checks, and the products themselves.
#pragma once

#include <string>

#include "call.h"
#include "multiply.h"
#include "output.h"

namespace phxt {

// A matrix of any strides.
struct Matrix {
  const char *name = "";
  int64_t rows = 0, columns = 0;
  int32_t dtype = 0;  // torch's
  ElementType type{};

  size_t count(int64_t of_rows) const { return static_cast<size_t>(of_rows) * static_cast<size_t>(columns); }
  size_t bytes(int64_t of_rows) const { return count(of_rows) * type.bytes; }
  std::string shape() const { return "[" + std::to_string(rows) + ", " + std::to_string(columns) + "]"; }
  std::string text() const { return std::string(name) + " is " + shape() + " of " + type.name; }
};

// A call and its checks, whoever serves it: nothing was sent when they raise.
struct Request {
  Call call;
  std::string group_name;

  [[noreturn]] void refuse(const std::string &text) const {
    if (call) call.refuse(text);
    raise(PHX_ERR_INVALID, std::string(call.op) + " on group '" + group_name + "': " + text);
  }

  // Where the core serves the call: complete, also if a pending operation was still to write it.
  Matrix matrix(const char *name, const Tensor &tensor) const;
  void check_factors(const Matrix &a, const Matrix &b) const;
  void check_size(int64_t group_size) const;
};

Tensor rows(const Tensor &matrix, int64_t begin, int64_t count);
Tensor product(const Tensor &a, const Tensor &b);  // on any device

// Memory of the host that is the owner's as a contiguous matrix, for as long as the memory is there.
Tensor as_matrix(void *data, int64_t rows, int64_t columns, int32_t dtype);

// Memory for `count` rows that are multiplied and sent, or gathered.
struct Block {
  Tensor tensor;
  char *data = nullptr;

  Block() = default;
  Block(const Call &call, int64_t count, const Matrix &columns_of, const Matrix &like)
      : tensor(empty({count, columns_of.columns}, like.dtype, call.gpu)),
        data(static_cast<char *>(mutable_data(tensor))) {}
};

}  // namespace phxt
