// A process group of the late device: its collectives are work on a stream of their own, which gloo does on host twins.
//
// As on NCCL, `wait` makes the current stream wait for the collective, not the host, and a collective starts only after
// what the current stream held when it was called.
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "collectives.h"
#include "memory.h"
#include "timeline.h"
#include "twins.h"

namespace late {
namespace {

using at::Tensor;
using c10d::Backend;
using c10d::OpType;
using c10d::ReduceOp;
using c10d::Work;
using collectives::flat;
using collectives::reduced;
using collectives::Tensors;
using WorkPtr = c10::intrusive_ptr<Work>;

// Keeps its tensors until the caller waits; a caller that never does leaves them to the allocator's record of streams.
class LateWork final : public Work {
 public:
  LateWork(int rank, OpType type, MarkPtr mark, Tensors tensors, Tensors outputs)
      : Work(rank, type), mark_(std::move(mark)), tensors_(std::move(tensors)), outputs_(std::move(outputs)) {}
  ~LateWork() override {
    for (const Tensor& tensor : tensors_)
      if (is_late(tensor))
        device_memory()->recordStream(tensor.storage().data_ptr(),
                                      c10::Stream(c10::Stream::UNSAFE, c10::Device(at::kPrivateUse1, 0), mark_->stream));
  }

  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }
  void synchronize() override {
    if (opType_ == OpType::BARRIER) force(mark_);
    else block(current_stream(), mark_);
    tensors_.clear();
  }
  void blockCurrentStream() override { synchronize(); }
  bool isCompleted() override { return query(mark_); }
  bool isSuccess() const override { return true; }
  Tensors result() override { return outputs_; }

 private:
  const MarkPtr mark_;
  Tensors tensors_;
  const Tensors outputs_;
};

struct Transfer {
  std::atomic<bool> ended{false};
  std::exception_ptr error;
};

Tensors twins(const Tensors& tensors) {
  Tensors made;
  for (const Tensor& tensor : tensors) made.push_back(is_late(tensor) ? host_twin(tensor) : tensor);
  return made;
}

Tensors joined(Tensors first, const Tensors& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

void reduce_rows(const Tensor& addends, const Tensor& target, const ReduceOp& op) {
  target.copy_(reduced(addends, op).view_as(target));
}

class LateGroup final : public Backend {
 public:
  explicit LateGroup(c10::intrusive_ptr<Backend> gloo)
      : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)), collectives_(new_stream()) {}

  const std::string getBackendName() const override { return "late"; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo_->setTimeout(timeout); }
  // What is under way ends with undefined contents, and without an error, as NCCL's does; nothing is started any more.
  void abort() override {
    *aborted_ = true;
    wake();
  }
  void shutdown() override { gloo_->shutdown(); }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return run(OpType::BROADCAST, tensors, {}, [gloo = gloo_, on = twins(tensors), options]() mutable {
      return gloo->broadcast(on, options);
    });
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto mine = options;
    const bool mean = options.reduceOp == ReduceOp::AVG;
    if (mean) mine.reduceOp = ReduceOp::SUM;
    auto on = twins(tensors);
    auto divide = [on, ranks = size_] {
      for (const Tensor& each : on) each.div_(ranks);
    };
    return run(OpType::ALLREDUCE, tensors, {}, [gloo = gloo_, on, mine]() mutable { return gloo->allreduce(on, mine); },
               mean ? std::function<void()>(divide) : nullptr);
  }

  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return run(OpType::REDUCE, tensors, {}, [gloo = gloo_, on = twins(tensors), options]() mutable {
      return gloo->reduce(on, options);
    });
  }

  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    std::vector<Tensors> to;
    for (const Tensors& list : outputs) to.push_back(twins(list));
    return run(OpType::ALLGATHER, inputs, flat(outputs), [gloo = gloo_, to, from = twins(inputs), options]() mutable {
      return gloo->allgather(to, from, options);
    });
  }

  WorkPtr _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) override {
    return run(OpType::_ALLGATHER_BASE, {input}, {output},
               [gloo = gloo_, to = host_twin(output), from = host_twin(input), options]() mutable {
                 return gloo->_allgather_base(to, from, options);
               });
  }

  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    std::vector<Tensors> to;
    for (const Tensors& list : outputs) to.push_back(twins(list));
    return run(OpType::GATHER, inputs, flat(outputs), [gloo = gloo_, to, from = twins(inputs), options]() mutable {
      return gloo->gather(to, from, options);
    });
  }

  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    std::vector<Tensors> from;
    for (const Tensors& list : inputs) from.push_back(twins(list));
    return run(OpType::SCATTER, flat(inputs), outputs, [gloo = gloo_, from, to = twins(outputs), options]() mutable {
      return gloo->scatter(to, from, options);
    });
  }

  WorkPtr _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override {
    const Tensor from = host_twin(input), received = at::empty({size_, output.numel()}, from.options());
    return run(OpType::_REDUCE_SCATTER_BASE, {input}, {output}, exchange(received, from, {}, {}),
               [received, to = host_twin(output), op = options.reduceOp] { reduce_rows(received, to, op); });
  }

  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) override {
    TORCH_CHECK(outputs.size() == 1 && inputs.size() == 1, "the late device reduces one tensor at a time");
    const Tensors from = twins(inputs[0]);
    const Tensor received = at::empty({size_, outputs[0].numel()}, from[0].options()), sent = at::empty_like(received);
    return run(OpType::REDUCE_SCATTER, inputs[0], outputs, exchange(received, sent, {}, {}, [from, sent] { pack(from, sent); }),
               [received, to = host_twin(outputs[0]), op = options.reduceOp] { reduce_rows(received, to, op); });
  }

  WorkPtr alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& to, std::vector<int64_t>& from,
                        const c10d::AllToAllOptions&) override {
    return run(OpType::ALLTOALL_BASE, {input}, {output}, exchange(host_twin(output), host_twin(input), to, from));
  }

  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions&) override {
    const Tensors from = twins(inputs), to = twins(outputs);
    std::vector<int64_t> sizes_in, sizes_out;
    int64_t in = 0, out = 0;
    for (const Tensor& each : from) in += sizes_in.emplace_back(each.numel());
    for (const Tensor& each : to) out += sizes_out.emplace_back(each.numel());
    const Tensor sent = at::empty({in}, from[0].options()), received = at::empty({out}, from[0].options());
    return run(OpType::ALLTOALL, inputs, outputs, exchange(received, sent, sizes_out, sizes_in, [from, sent] { pack(from, sent); }),
               [to, received] { unpack(received, to); });
  }

  WorkPtr send(Tensors& tensors, int peer, int tag) override {
    return run(OpType::SEND, tensors, {}, [gloo = gloo_, on = twins(tensors), peer, tag]() mutable {
      return gloo->send(on, peer, tag);
    }, nullptr, messages(peer, true));
  }

  WorkPtr recv(Tensors& tensors, int peer, int tag) override {
    return run(OpType::RECV, {}, tensors, [gloo = gloo_, on = twins(tensors), peer, tag]() mutable {
      return gloo->recv(on, peer, tag);
    }, nullptr, messages(peer, false));
  }

  WorkPtr barrier(const c10d::BarrierOptions&) override {
    return run(OpType::BARRIER, {}, {}, [gloo = gloo_] { return gloo->barrier(c10d::BarrierOptions()); });
  }

 private:
  using Start = std::function<WorkPtr()>;

  static void pack(const Tensors& from, const Tensor& to) {
    Tensor rest = to.view(-1);
    for (const Tensor& each : from) {
      rest.narrow(0, 0, each.numel()).copy_(each.reshape(-1));
      rest = rest.narrow(0, each.numel(), rest.numel() - each.numel());
    }
  }

  static void unpack(const Tensor& from, const Tensors& to) {
    Tensor rest = from.view(-1);
    for (const Tensor& each : to) {
      each.copy_(rest.narrow(0, 0, each.numel()).view_as(each));
      rest = rest.narrow(0, each.numel(), rest.numel() - each.numel());
    }
  }

  Start exchange(Tensor to, Tensor from, std::vector<int64_t> sizes_out, std::vector<int64_t> sizes_in,
                 std::function<void()> before = nullptr) {
    return [gloo = gloo_, to, from, sizes_out, sizes_in, before]() mutable {
      if (before) before();
      return gloo->alltoall_base(to, from, sizes_out, sizes_in, c10d::AllToAllOptions());
    };
  }

  // The stream of messages to, or from, one peer: messages of a pair do not wait for those of others.
  int64_t messages(int peer, bool sent) {
    Guard guard;
    auto found = messages_.find({peer, sent});
    return (found != messages_.end() ? found : messages_.emplace(std::pair{peer, sent}, new_stream()).first)->second;
  }

  WorkPtr run(OpType type, Tensors inputs, const Tensors& outputs, Start start, std::function<void()> finish = nullptr,
              int64_t stream = -1) {
    if (stream < 0) stream = collectives_;
    block(stream, record(current_stream()));
    auto transfer = std::make_shared<Transfer>();
    submit_launch(
        stream,
        [start = std::move(start), transfer, aborted = aborted_]() mutable {
          if (*aborted) return;
          WorkPtr work;
          try {
            work = start();
          } catch (...) {
            transfer->ended = true;
            throw;
          }
          std::thread([work, transfer] {
            try {
              work->wait();
            } catch (...) {
              transfer->error = std::current_exception();
            }
            transfer->ended = true;
            wake();
          }).detach();
        },
        [transfer, aborted = aborted_] { return transfer->ended.load() || aborted->load(); });
    submit(stream, [transfer, aborted = aborted_, finish = std::move(finish)] {
      if (*aborted) return;
      if (transfer->error) std::rethrow_exception(transfer->error);
      if (finish) finish();
    });
    return c10::make_intrusive<LateWork>(rank_, type, record(stream), joined(std::move(inputs), outputs), outputs);
  }

  const c10::intrusive_ptr<Backend> gloo_;
  const int64_t collectives_;
  const std::shared_ptr<std::atomic<bool>> aborted_ = std::make_shared<std::atomic<bool>>(false);
  std::map<std::pair<int, bool>, int64_t> messages_;
};

PYBIND11_MODULE(late_group, module) {
  module.def("over_gloo", [](const c10::intrusive_ptr<Backend>& gloo) -> c10::intrusive_ptr<Backend> {
    return c10::make_intrusive<LateGroup>(gloo);
  });
}

}  // namespace
}  // namespace late
