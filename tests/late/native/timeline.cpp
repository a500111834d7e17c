#include "timeline.h"

#include <Python.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <random>
#include <thread>
#include <utility>
#include <vector>

namespace late {
namespace {

constexpr auto IDLE = std::chrono::milliseconds(20);   // the host gives no work for so long: launches that are due happen
constexpr auto STALL = std::chrono::milliseconds(5);   // a force waits so long for other ranks before other launches happen
constexpr int64_t QUERIES = 3;                         // so many queries find a mark reached
constexpr uint64_t REDRAW = 64;                        // priorities are drawn anew once in so many tasks

using Clock = std::chrono::steady_clock;

struct Task {
  std::function<void()> run;    // empty for marks and waits
  std::function<bool()> ended;  // work that was launched: the stream goes on once it returns true
  MarkPtr recorded;
  MarkPtr awaited;
  bool launch = false;
};

struct State {
  std::recursive_mutex mutex;
  std::condition_variable_any ended;
  std::vector<std::deque<Task>> streams{1};
  std::vector<int64_t> queries;  // of a whole stream, by stream
  std::mt19937_64 random{0};
  uint64_t seed = 0;
  std::vector<uint64_t> priority;  // by stream, 0: does not run ahead
  int64_t launches = 0;            // not started yet
  std::exception_ptr failure;
  std::atomic<Clock::rep> active{0};  // when the host last gave work
  bool watched = false;
};

State& state() {
  static State* made = new State;  // never destroyed: tensors may be freed after static destructors
  return *made;
}

thread_local int64_t stream_of_thread = 0;

// Releases the interpreter's lock for as long as it lives, if this thread holds it.
class WithoutInterpreter {
 public:
  WithoutInterpreter() {
    if (Py_IsInitialized() && PyGILState_GetThisThreadState() != nullptr && PyGILState_Check()) saved_ = PyEval_SaveThread();
  }
  ~WithoutInterpreter() {
    if (saved_ != nullptr) PyEval_RestoreThread(saved_);
  }

 private:
  PyThreadState* saved_ = nullptr;
};

double seconds() { return std::chrono::duration<double>(Clock::now().time_since_epoch()).count(); }

void reach(Mark& mark) {
  mark.reached = true;
  mark.seconds = seconds();
}

bool runnable(int64_t stream) {
  auto& tasks = state().streams[stream];
  if (tasks.empty()) return false;
  const Task& head = tasks.front();
  return (!head.awaited || head.awaited->reached) && (!head.ended || head.ended());
}

void run_head(int64_t stream) {
  auto& s = state();
  Task task = std::move(s.streams[stream].front());
  s.streams[stream].pop_front();
  s.launches -= task.launch;
  try {
    if (task.run) task.run();
  } catch (...) {
    if (!s.failure) s.failure = std::current_exception();
  }
  if (task.recorded) reach(*task.recorded);
}

// The stream whose head is what `stream` waits for, directly or through others.
int64_t blocking(int64_t stream) {
  auto& s = state();
  while (true) {
    const Task& head = s.streams[stream].front();
    if (!head.awaited || head.awaited->reached) return stream;
    stream = head.awaited->stream;
  }
}

void draw_priorities() {
  auto& s = state();
  s.priority.assign(s.streams.size(), 0);
  if (s.seed == 0) return;
  for (auto& priority : s.priority) priority = s.random() % 2 ? 1 + s.random() % 1000 : 0;
}

int64_t choose(int64_t needed) {
  auto& s = state();
  if (s.seed != 0 && s.random() % REDRAW == 0) draw_priorities();
  s.priority.resize(s.streams.size(), 0);
  int64_t best = needed;
  for (size_t stream = 0; stream < s.streams.size(); ++stream)
    if (s.priority[stream] > s.priority[best] && runnable(static_cast<int64_t>(stream))) best = static_cast<int64_t>(stream);
  return best;
}

// Runs one task that a launch still waits for, and returns whether there was one that could run.
bool advance_launches() {
  auto& s = state();
  for (size_t stream = 0; stream < s.streams.size(); ++stream) {
    const auto& tasks = s.streams[stream];
    if (std::none_of(tasks.begin(), tasks.end(), [](const Task& task) { return task.launch; })) continue;
    const int64_t next = blocking(static_cast<int64_t>(stream));
    if (runnable(next)) {
      run_head(next);
      return true;
    }
  }
  return false;
}

// A device starts what other ranks wait for even if its host is blocked elsewhere.
void watch() {
  auto& s = state();
  while (true) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    if (Clock::now().time_since_epoch().count() - s.active.load() < Clock::duration(IDLE).count()) continue;
    Guard guard;
    while (s.launches > 0 && advance_launches()) {
    }
  }
}

void append(int64_t stream, Task task) {
  auto& s = state();
  s.active.store(Clock::now().time_since_epoch().count());
  s.streams.at(stream).push_back(std::move(task));
}

}  // namespace

Guard::Guard() {
  if (state().mutex.try_lock()) return;
  WithoutInterpreter released;
  state().mutex.lock();
}

Guard::~Guard() { state().mutex.unlock(); }

int64_t current_stream() { return stream_of_thread; }

int64_t exchange_stream(int64_t stream) { return std::exchange(stream_of_thread, stream); }

int64_t new_stream() {
  Guard guard;
  state().streams.emplace_back();
  return static_cast<int64_t>(state().streams.size()) - 1;
}

void submit(int64_t stream, std::function<void()> run) {
  Guard guard;
  Task task;
  task.run = std::move(run);
  append(stream, std::move(task));
}

void submit_launch(int64_t stream, std::function<void()> launch, std::function<bool()> ended) {
  Guard guard;
  auto& s = state();
  Task start, end;
  start.run = std::move(launch);
  start.launch = true;
  end.ended = std::move(ended);
  ++s.launches;
  append(stream, std::move(start));
  append(stream, std::move(end));
  if (!std::exchange(s.watched, true)) std::thread(watch).detach();
}

MarkPtr record(int64_t stream) {
  Guard guard;
  auto mark = std::make_shared<Mark>();
  mark->stream = stream;
  if (state().streams.at(stream).empty()) {
    reach(*mark);
    return mark;
  }
  Task task;
  task.recorded = mark;
  append(stream, std::move(task));
  return mark;
}

void block(int64_t stream, const MarkPtr& mark) {
  Guard guard;
  if (mark->reached || mark->stream == stream) return;
  Task task;
  task.awaited = mark;
  append(stream, std::move(task));
}

bool query(const MarkPtr& mark) {
  Guard guard;
  if (mark->reached || ++mark->queries < QUERIES) return mark->reached;
  draw_priorities();
  while (!mark->reached) {
    const int64_t needed = choose(blocking(mark->stream));
    if (runnable(needed)) run_head(needed);
    else if (!advance_launches()) return false;
  }
  return true;
}

bool query_stream(int64_t stream) {
  {
    Guard guard;
    auto& s = state();
    s.queries.resize(s.streams.size(), 0);
    if (s.streams[stream].empty()) return true;
    if (++s.queries[stream] < QUERIES) return false;
    s.queries[stream] = 0;
  }
  const MarkPtr mark = record(stream);
  mark->queries = QUERIES;
  return query(mark);
}

void force(const MarkPtr& mark) {
  Guard guard;  // the only one that this thread holds: the wait below releases one
  auto& s = state();
  draw_priorities();
  auto since = Clock::now();
  while (!mark->reached) {
    const int64_t needed = choose(blocking(mark->stream));
    if (runnable(needed)) {
      run_head(needed);
      since = Clock::now();
      continue;
    }
    if (Clock::now() - since > STALL && advance_launches()) continue;
    WithoutInterpreter released;
    s.ended.wait_for(s.mutex, std::chrono::milliseconds(1));
  }
  if (s.failure) std::rethrow_exception(std::exchange(s.failure, nullptr));
}

void force_stream(int64_t stream) { force(record(stream)); }

void force_all() {
  int64_t streams = 0;
  {
    Guard guard;
    streams = static_cast<int64_t>(state().streams.size());
  }
  for (int64_t stream = 0; stream < streams; ++stream) force_stream(stream);
}

void wake() { state().ended.notify_all(); }

void set_seed(uint64_t seed) {
  Guard guard;
  state().seed = seed;
  state().random.seed(seed);
}

int64_t queued() {
  Guard guard;
  int64_t tasks = 0;
  for (const auto& stream : state().streams) tasks += static_cast<int64_t>(stream.size());
  return tasks;
}

}  // namespace late

extern "C" {
void late_set_seed(uint64_t seed) { late::set_seed(seed); }
int64_t late_queued() { return late::queued(); }
}
