// Random elements in memory of a GPU are those of the host, bit for bit: on the driver of the host, or on the one of
// fake_cuda/ (CTest gives that one).
#include <functional>

#include "gpu_stream.h"
#include "ranks.h"

using gpu::Gpu;
using gpu::kGpu;
using gpu::OwnStream;

namespace {

constexpr uint64_t kKey = 0x243f6a8885a308d3;
constexpr size_t kElements = 4096;

struct Box {
  uint64_t first;
  std::vector<int64_t> sizes, index_strides, out_strides;
};

// Whole, from an odd element on, the columns of a matrix, with gaps, backwards, of many dims, of one element, empty.
std::vector<Box> boxes() {
  return {
      {0, {1000}, {1}, {1}},
      {7, {333}, {1}, {1}},
      {20, {30, 10}, {10, 1}, {1, 30}},
      {5, {3, 4, 50}, {1000, 77, 3}, {600, 150, 3}},
      {900, {100}, {-3}, {2}},
      {1, {2, 1, 2, 2, 2, 2, 2, 2, 2, 2}, {900, 5, 300, 90, 31, 14, 7, 5, 3, 1}, {700, 9, 300, 90, 31, 14, 7, 5, 3, 1}},
      {uint64_t{1} << 40, {}, {}, {}},
      {3, {4, 0}, {1, 1}, {1, 1}}};
}

using Fill = std::function<phx_status(const phx_device *, void *stream, void *out, const Box &)>;

class World {
 public:
  World() : world_(ranks::make_world(0, 1, nullptr)) {
    CHECK_OK(phx_mem_alloc(world_, &kGpu, kElements * 8, &memory_));
  }
  ~World() {
    phx_mem_free(world_, memory_);
    phx_world_release(world_);
  }
  World(const World &) = delete;
  World &operator=(const World &) = delete;
  void *memory() const { return memory_; }

  // The same on both, or refused by both.
  void expect_alike(const Fill &fill, const std::string &what) const {
    for (const Box &box : boxes()) {
      std::vector<unsigned char> there(kElements * 8, 0x5a), here = there;
      Gpu().write(memory_, there);
      const phx_status on_host = fill(nullptr, nullptr, here.data(), box);
      const phx_status on_gpu = fill(&kGpu, stream_.get(), memory_, box);
      stream_.wait();
      if (on_gpu != on_host || Gpu().read(memory_, there.size()) != here) check::failed(__FILE__, __LINE__, what);
    }
  }

 private:
  phx_world *const world_;
  void *memory_ = nullptr;
  OwnStream stream_;
};

}  // namespace

TEST(every_kind_and_dtype_has_the_bits_of_the_host) {
  gpu::needs_driver();
  const World world;
  int defined = 0;
  for (int32_t kind = PHX_RANDOM_BITS; kind <= PHX_RANDOM_LOG_NORMAL; ++kind)
    for (int32_t dtype = PHX_DTYPE_F16; dtype <= PHX_DTYPE_F8E5M2; ++dtype) {
      const Fill fill = [&](const phx_device *device, void *stream, void *out, const Box &box) {
        return phx_random_fill_on(device, stream, out, dtype, kind, 0.25, 0.75, kKey, box.first,
                                  static_cast<int32_t>(box.sizes.size()), box.sizes.data(), box.index_strides.data(),
                                  box.out_strides.data());
      };
      double one = 0;
      if (fill(nullptr, nullptr, &one, {0, {}, {}, {}}) == PHX_OK) ++defined;
      world.expect_alike(fill, std::string("kind ") + std::to_string(kind) + " of " + phx_dtype_name(dtype));
    }
  CHECK(defined ==
        4 + 5 * 4 + 13);  // bits; five kinds of floats; bernoulli of all real types but those of 8-bit floats
}

TEST(integers_of_every_dtype_have_the_bits_of_the_host) {
  gpu::needs_driver();
  const World world;
  for (int32_t dtype = PHX_DTYPE_F16; dtype <= PHX_DTYPE_F8E5M2; ++dtype)
    for (const uint64_t range : {uint64_t{1}, uint64_t{6}, uint64_t{1} << 16, (uint64_t{1} << 16) + 1, uint64_t{0}})
      world.expect_alike(
          [&](const phx_device *device, void *stream, void *out, const Box &box) {
            return phx_random_integers_on(device, stream, out, dtype, -3, range, kKey, box.first,
                                          static_cast<int32_t>(box.sizes.size()), box.sizes.data(),
                                          box.index_strides.data(), box.out_strides.data());
          },
          std::string("integers of ") + phx_dtype_name(dtype) + ", range " + std::to_string(range));
}

TEST(wrong_requests_say_so) {
  gpu::needs_driver();
  const World world;
  const int64_t four = 4, one = 1;
  const auto fill = [&](const phx_device &device, void *stream, void *out, double a, double b) {
    return phx_random_fill_on(&device, stream, out, PHX_DTYPE_F32, PHX_RANDOM_UNIFORM, a, b, kKey, 0, 1, &four, &one,
                              &one);
  };
  float host[4];
  CHECK_FAILS(PHX_ERR_INVALID, "out is not memory that", fill(kGpu, nullptr, host, 0, 1));
  CHECK_FAILS(PHX_ERR_INVALID, "a must not be above b", fill(kGpu, nullptr, world.memory(), 1, 0));
  CHECK_FAILS(PHX_ERR_INVALID, "there is no CUDA device 99",
              fill({PHX_DEVICE_CUDA, 99}, nullptr, world.memory(), 0, 1));
  CHECK_FAILS(PHX_ERR_INVALID, "unknown device type 7", fill({7, 0}, nullptr, world.memory(), 0, 1));
  CHECK_FAILS(PHX_ERR_INVALID, "the memory is not on a GPU", fill({PHX_DEVICE_CPU, 0}, host, host, 0, 1));
  CHECK_FAILS(PHX_ERR_INVALID, "out is NULL", fill(kGpu, nullptr, nullptr, 0, 1));
}

TEST(a_graph_fills_again) {
  gpu::needs_driver();
  const World world;
  const OwnStream stream;
  const int64_t size = 100, one = 1;
  std::vector<unsigned char> wanted(400);
  const auto fill = [&](const phx_device *device, void *on, void *out) {
    return phx_random_fill_on(device, on, out, PHX_DTYPE_F32, PHX_RANDOM_NORMAL, 0, 1, kKey, 0, 1, &size, &one, &one);
  };
  CHECK_OK(fill(nullptr, nullptr, wanted.data()));
  const gpu::Graph graph(stream, [&] { CHECK_OK(fill(&kGpu, stream.get(), world.memory())); });
  for (int i = 0; i < 3; ++i) {
    Gpu().write(world.memory(), std::vector<unsigned char>(400));
    graph.replay();
    stream.wait();
    CHECK(Gpu().read(world.memory(), 400) == wanted);
  }
}

int main(int argc, char **argv) { return check::run_all(argc, argv); }
