// The driver without a GPU: streams, events, and graphs of what is captured.
#include <utility>

#include "fake_cuda/state.h"

using namespace fake_cuda;
using namespace phx::cuda;

namespace {

FakeEvent &event_of(Event event) { return *reinterpret_cast<FakeEvent *>(event); }

}  // namespace

FAKE(cuStreamCreate, (Stream * stream, unsigned)) {
  MAY_FAIL(cuStreamCreate);
  if (current_contexts().empty()) return kInvalidContext;
  *stream = reinterpret_cast<Stream>(new FakeStream);
  s.streams[*stream] = current_device();
  return kOk;
}
FAKE(cuStreamDestroy_v2, (Stream stream)) {
  {
    MAY_FAIL(cuStreamDestroy_v2);
    if (stream == nullptr || s.streams.erase(stream) == 0) return kInvalidHandle;
  }
  delete &stream_of(stream);
  return kOk;
}
FAKE(cuStreamSynchronize, (Stream stream)) {
  {
    MAY_FAIL(cuStreamSynchronize);
    if (is_captured_out(s)) return kCaptureUnsupported;
    if (is_gone(s, stream)) return kInvalidHandle;
  }
  stream_of(stream).wait();
  return kOk;
}
FAKE(cuStreamQuery, (Stream stream)) {
  MAY_FAIL(cuStreamQuery);
  if (is_captured_out(s)) return kCaptureUnsupported;
  if (is_gone(s, stream)) return kInvalidHandle;
  return stream_of(stream).idle() ? kOk : kNotReady;
}
FAKE(cuStreamWaitEvent, (Stream stream, Event event, unsigned flags)) {
  MAY_FAIL(cuStreamWaitEvent);
  if (current_contexts().empty()) return kInvalidContext;
  if (flags != 0) return kInvalidValue;
  if (is_gone(s, stream)) return kInvalidHandle;
  return event_of(event).order(stream_of(stream)) ? kOk : kCaptureIsolation;
}
FAKE(cuLaunchHostFunc, (Stream stream, void (*function)(void *), void *data)) {
  MAY_FAIL(cuLaunchHostFunc);
  if (is_gone(s, stream)) return kInvalidHandle;
  stream_of(stream).put([=] { function(data); });
  return kOk;
}
FAKE(cuStreamBeginCapture_v2, (Stream stream, int mode)) {
  MAY_FAIL(cuStreamBeginCapture_v2);
  if (is_gone(s, stream)) return kInvalidHandle;
  if (stream == nullptr || stream_of(stream).capturing()) return kInvalidValue;
  stream_of(stream).capture(true);
  s.captures[stream] = {mode, std::this_thread::get_id()};
  return kOk;
}
// Graphs and what is made of them are the same thing.
FAKE(cuStreamEndCapture, (Stream stream, void **graph)) {
  MAY_FAIL(cuStreamEndCapture);
  if (s.captures.erase(stream) == 0) return kInvalidValue;
  *graph = new GraphRef(stream_of(stream).capture(false));
  return kOk;
}
FAKE(cuGraphInstantiateWithFlags, (void **made, void *graph, unsigned long long)) {
  MAY_FAIL(cuGraphInstantiateWithFlags);
  *made = new GraphRef(*static_cast<GraphRef *>(graph));
  return kOk;
}
FAKE(cuGraphLaunch, (void *made, Stream stream)) {
  MAY_FAIL(cuGraphLaunch);
  if (is_gone(s, stream)) return kInvalidHandle;
  stream_of(stream).launch(**static_cast<GraphRef *>(made));
  return kOk;
}
FAKE(cuGraphExecDestroy, (void *made)) {
  MAY_FAIL(cuGraphExecDestroy);
  delete static_cast<GraphRef *>(made);
  return kOk;
}
FAKE(cuGraphDestroy, (void *graph)) {
  MAY_FAIL(cuGraphDestroy);
  delete static_cast<GraphRef *>(graph);
  return kOk;
}
FAKE(cuStreamGetCaptureInfo_v2,
     (Stream stream, int *status, uint64_t *id, void **graph, const void **nodes, size_t *count)) {
  MAY_FAIL(cuStreamGetCaptureInfo_v2);
  if (graph != nullptr || nodes != nullptr || count != nullptr) return kInvalidValue;  // nobody asks
  const GraphRef captured = stream_of(stream).captured_into();
  *status = captured != nullptr ? 1 : kNotCapturing;
  *id = captured != nullptr ? captured->id : 0;
  return kOk;
}
FAKE(cuThreadExchangeStreamCaptureMode, (int *mode)) {
  std::swap(capture_mode(), *mode);
  return kOk;
}
FAKE(cuStreamIsCapturing, (Stream stream, int *status)) {
  MAY_FAIL(cuStreamIsCapturing);
  if (is_gone(s, stream)) return kInvalidHandle;
  *status = stream_of(stream).capturing() ? 1 : kNotCapturing;
  return kOk;
}
FAKE(cuEventCreate, (Event * event, unsigned)) {
  MAY_FAIL(cuEventCreate);
  if (current_contexts().empty()) return kInvalidContext;
  ++s.events;
  *event = reinterpret_cast<Event>(new FakeEvent);
  return kOk;
}
FAKE(cuEventDestroy_v2, (Event event)) {
  MAY_FAIL(cuEventDestroy_v2);
  --s.events;
  delete &event_of(event);
  return kOk;
}
FAKE(cuEventRecord, (Event event, Stream stream)) {
  MAY_FAIL(cuEventRecord);
  if (is_gone(s, stream)) return kInvalidHandle;
  event_of(event).record(stream_of(stream));
  return kOk;
}
FAKE(cuEventSynchronize, (Event event)) {
  {
    MAY_FAIL(cuEventSynchronize);
    if (is_captured_out(s)) return kCaptureUnsupported;
  }
  return event_of(event).wait() ? kOk : kCapturedEvent;
}
FAKE(cuEventQuery, (Event event)) {
  MAY_FAIL(cuEventQuery);
  if (is_captured_out(s)) return kCaptureUnsupported;
  return event_of(event).done() ? kOk : kNotReady;
}
