// Streams, events and processors of the driver without a GPU: what is put on a stream runs in order, on a thread of the
// stream, and as many blocks run at once as there are processors.
#pragma once

#include <unistd.h>

#include <atomic>
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

// What was put on streams while they were captured, in that order, which is one that the dependencies allow.
struct Graph {
  const uint64_t id = next_id();
  std::vector<Task> tasks;
  std::atomic<bool> ended{false};

 private:
  static uint64_t next_id() {
    static std::atomic<uint64_t> last{0};
    return ++last;
  }
};
using GraphRef = std::shared_ptr<Graph>;

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
    if (is_capturing()) {
      graph_->tasks.push_back(std::move(task));
      return;
    }
    tasks_.push_back(std::move(task));
    changed_.notify_all();
  }
  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return tasks_.empty() && !busy_; });
  }
  bool idle() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return tasks_.empty() && !busy_;
  }
  bool capturing() { return captured_into() != nullptr; }
  GraphRef captured_into() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return is_capturing() ? graph_ : nullptr;
  }
  // A stream that waits for one that is captured is captured as well, until that one's capture ends.
  void join(GraphRef graph) {
    const std::lock_guard<std::mutex> lock(mutex_);
    graph_ = std::move(graph);
  }
  GraphRef capture(bool on) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (on)
      graph_ = std::make_shared<Graph>();
    else if (graph_ != nullptr)
      graph_->ended = true;
    return graph_;
  }
  void launch(const Graph &graph) {
    const std::lock_guard<std::mutex> lock(mutex_);
    tasks_.insert(tasks_.end(), graph.tasks.begin(), graph.tasks.end());
    changed_.notify_all();
  }
  bool is_of_this_process() const { return owner_ == getpid(); }

 private:
  bool is_capturing() const { return graph_ != nullptr && !graph_->ended; }
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
  GraphRef graph_;  // the last one that this stream was captured into
  bool busy_ = false, ending_ = false;
  std::thread worker_;  // last: it uses the others
};

// The state of the last record, which outlives an event that is destroyed before the stream comes to it.
class FakeEvent {
 public:
  void record(FakeStream &stream) {
    auto record = std::make_shared<Record>();
    record->graph = stream.captured_into();
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      last_ = record;
    }
    stream.put([record] { record->finish(); });
  }
  // False where it was recorded by a capture, so that the host cannot wait for it.
  bool wait() {
    const RecordRef record = last();
    if (record != nullptr && record->graph != nullptr) return false;
    if (record != nullptr) record->wait();
    return true;
  }
  bool done() {
    const RecordRef record = last();
    return record == nullptr || record->done();
  }
  // What is put on the stream from now on comes after what was recorded. False where that would lead into a capture
  // from outside.
  bool order(FakeStream &stream) {
    const RecordRef record = last();
    if (record == nullptr) return true;
    if (record->graph != nullptr) {
      if (record->graph->ended) return false;
      if (!stream.capturing()) stream.join(record->graph);
      return stream.captured_into() == record->graph;
    }
    if (stream.capturing()) return false;
    stream.put([record] { record->wait(); });
    return true;
  }

 private:
  struct Record {
    void finish() {
      const std::lock_guard<std::mutex> lock(mutex);
      finished = true;
      changed.notify_all();
    }
    void wait() {
      std::unique_lock<std::mutex> lock(mutex);
      changed.wait(lock, [&] { return finished; });
    }
    bool done() {
      const std::lock_guard<std::mutex> lock(mutex);
      return finished;
    }
    std::mutex mutex;
    std::condition_variable changed;
    bool finished = false;
    GraphRef graph;  // of the capture that recorded it
  };
  using RecordRef = std::shared_ptr<Record>;
  RecordRef last() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return last_;
  }

  std::mutex mutex_;
  RecordRef last_;
};

}  // namespace fake_cuda
