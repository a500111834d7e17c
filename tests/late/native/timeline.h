// The time of the late device: tasks wait in streams until the host forces them, and then run as late as waits allow.
//
// A stream is a queue in program order; marks (the versions of events) order streams with each other. `force(mark)` runs
// only the chain of tasks that the mark depends on. A seed other than 0 also draws, at each force, which other streams
// run ahead, and in which order of priority. Every function may be called from any thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

namespace late {

// A point in a stream that is reached when all tasks before it have run.
struct Mark {
  int64_t stream = 0;
  bool reached = false;
  int64_t queries = 0;
  double seconds = 0;  // when it was reached, by the host's clock
};
using MarkPtr = std::shared_ptr<Mark>;

// Holds the one lock of the device. Releases the interpreter's lock while it waits, since a task may need the interpreter.
class Guard {
 public:
  Guard();
  ~Guard();
  Guard(const Guard&) = delete;
};

int64_t current_stream();
int64_t exchange_stream(int64_t stream);  // of this thread; returns the previous one
int64_t new_stream();

void submit(int64_t stream, std::function<void()> run);
// Submits work that other ranks wait for: `launch` starts it, and it has ended once `ended` returns true.
void submit_launch(int64_t stream, std::function<void()> launch, std::function<bool()> ended);
MarkPtr record(int64_t stream);
void block(int64_t stream, const MarkPtr& mark);

// A host that asks again and again finds the mark reached, since a device goes on by itself; it never waits for other ranks,
// and the error of a task that failed is left to `force`.
bool query(const MarkPtr& mark);
bool query_stream(int64_t stream);
void force(const MarkPtr& mark);  // rethrows the error of a task that failed
void force_stream(int64_t stream);
void force_all();
void wake();  // work that was launched has ended

void set_seed(uint64_t seed);
int64_t queued();

}  // namespace late
