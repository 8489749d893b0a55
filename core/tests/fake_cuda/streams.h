// Streams, events and processors of the driver without a GPU: what is put on a stream runs in order, on a thread of the
// stream, and as many blocks run at once as there are processors.
#pragma once

#include <unistd.h>

#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace fake_cuda {

inline int number(const char *variable, int otherwise) {
  const char *given = std::getenv(variable);
  return given != nullptr ? std::atoi(given) : otherwise;
}

class Processors {
 public:
  void take() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return taken_ < number("FAKE_CUDA_PROCESSORS", 6); });
    ++taken_;
  }
  void give() {
    const std::lock_guard<std::mutex> lock(mutex_);
    --taken_;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int taken_ = 0;
};

using Task = std::function<void()>;

class FakeStream {
 public:
  FakeStream() : worker_([this] { work(); }) {}
  ~FakeStream() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      ending_ = true;
      changed_.notify_all();
    }
    if (owner_ == getpid())
      worker_.join();
    else
      worker_.detach();
  }
  FakeStream(const FakeStream &) = delete;
  FakeStream &operator=(const FakeStream &) = delete;

  void put(Task task) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (capturing_) {
      graph_.push_back(std::move(task));
      return;
    }
    tasks_.push_back(std::move(task));
    changed_.notify_all();
  }
  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return tasks_.empty() && !busy_; });
  }
  bool capturing() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return capturing_;
  }
  void capture(bool on) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (on) graph_.clear();
    capturing_ = on;
  }
  void replay() {
    const std::lock_guard<std::mutex> lock(mutex_);
    tasks_.insert(tasks_.end(), graph_.begin(), graph_.end());
    changed_.notify_all();
  }
  bool is_of_this_process() const { return owner_ == getpid(); }

 private:
  void work() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return ending_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      const Task task = std::move(tasks_.front());
      tasks_.pop_front();
      busy_ = true;
      lock.unlock();
      task();
      lock.lock();
      busy_ = false;
      changed_.notify_all();
    }
  }

  const pid_t owner_ = getpid();
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  std::vector<Task> graph_;
  bool busy_ = false, ending_ = false, capturing_ = false;
  std::thread worker_;  // last: it uses the others
};

// Its state outlives it: what was put on streams may come later.
class FakeEvent {
 public:
  void record(FakeStream &stream) {
    const uint64_t number = state_->recorded();
    stream.put([state = state_, number] { state->reach(number); });
  }
  void wait() { state_->wait(state_->last()); }
  // What follows on the stream comes after what was recorded last.
  void hold(FakeStream &stream) {
    stream.put([state = state_, number = state_->last()] { state->wait(number); });
  }

 private:
  class State {
   public:
    uint64_t recorded() {
      const std::lock_guard<std::mutex> lock(mutex_);
      return ++last_;
    }
    uint64_t last() {
      const std::lock_guard<std::mutex> lock(mutex_);
      return last_;
    }
    void reach(uint64_t number) {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (number > reached_) reached_ = number;
      changed_.notify_all();
    }
    void wait(uint64_t number) {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [&] { return reached_ >= number; });
    }

   private:
    std::mutex mutex_;
    std::condition_variable changed_;
    uint64_t last_ = 0, reached_ = 0;
  };
  const std::shared_ptr<State> state_ = std::make_shared<State>();
};

}  // namespace fake_cuda
