// A process group whose collectives go through the host, by gloo: for ranks that share a device, which its own backend refuses.
//
// A call copies its inputs to the host, so it waits for the current stream; `wait` copies the outputs back in that stream.
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

#include <functional>
#include <mutex>
#include <utility>
#include <vector>

#include "collectives.h"

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

class StagedWork final : public Work {
 public:
  StagedWork(int rank, OpType type, WorkPtr work, std::function<void()> finish, Tensors outputs)
      : Work(rank, type), work_(std::move(work)), finish_(std::move(finish)), outputs_(std::move(outputs)) {}

  bool wait(std::chrono::milliseconds timeout) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (waited_) return true;
    work_->wait(timeout);
    finish_();
    waited_ = true;
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }
  void blockCurrentStream() override { wait(kNoTimeout); }
  bool isCompleted() override { return work_->isCompleted(); }
  bool isSuccess() const override { return true; }
  Tensors result() override { return outputs_; }

 private:
  std::mutex mutex_;
  bool waited_ = false;
  const WorkPtr work_;
  const std::function<void()> finish_;
  const Tensors outputs_;
};

Tensor host(const Tensor& tensor) { return tensor.variable_data().contiguous().cpu(); }

Tensor room(const Tensor& tensor) { return at::empty(tensor.sizes(), tensor.options().device(at::kCPU).requires_grad(false)); }

Tensors each(const Tensors& tensors, Tensor (*made)(const Tensor&)) {
  Tensors found;
  for (const Tensor& tensor : tensors) found.push_back(made(tensor));
  return found;
}

// `variable_data` has a version of its own: as with a device's backend, autograd counts no write.
void back(const Tensors& from, const Tensors& to) {
  const at::NoGradGuard guard;
  for (size_t index = 0; index < to.size(); ++index) to[index].variable_data().copy_(from[index]);
}

Tensor joined(const Tensors& tensors) {
  Tensors rows;
  for (const Tensor& tensor : tensors) rows.push_back(tensor.reshape(-1));
  return at::cat(rows);
}

std::vector<int64_t> sizes(const Tensors& tensors) {
  std::vector<int64_t> found;
  for (const Tensor& tensor : tensors) found.push_back(tensor.numel());
  return found;
}

class StagedGroup final : public Backend {
 public:
  explicit StagedGroup(c10::intrusive_ptr<Backend> gloo) : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {}

  const std::string getBackendName() const override { return "staged"; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo_->setTimeout(timeout); }
  void abort() override { gloo_->abort(); }
  void shutdown() override { gloo_->shutdown(); }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    Tensors on = each(tensors, host);
    return staged(OpType::BROADCAST, gloo_->broadcast(on, options), on, tensors);
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto mine = options;
    const bool mean = options.reduceOp == ReduceOp::AVG;
    if (mean) mine.reduceOp = ReduceOp::SUM;
    Tensors on = each(tensors, host);
    return staged(OpType::ALLREDUCE, gloo_->allreduce(on, mine), on, tensors, [on, mean, ranks = size_] {
      for (const Tensor& one : on)
        if (mean) one.div_(ranks);
    });
  }

  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    Tensors on = each(tensors, host);
    return staged(OpType::REDUCE, gloo_->reduce(on, options), on, tensors);
  }

  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    std::vector<Tensors> to;
    for (const Tensors& list : outputs) to.push_back(each(list, room));
    Tensors from = each(inputs, host);
    return staged(OpType::ALLGATHER, gloo_->allgather(to, from, options), flat(to), flat(outputs));
  }

  WorkPtr _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) override {
    Tensor to = room(output), from = host(input);
    return staged(OpType::_ALLGATHER_BASE, gloo_->_allgather_base(to, from, options), {to}, {output});
  }

  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    std::vector<Tensors> to;
    for (const Tensors& list : outputs) to.push_back(each(list, room));
    Tensors from = each(inputs, host);
    return staged(OpType::GATHER, gloo_->gather(to, from, options), flat(to), flat(outputs));
  }

  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    std::vector<Tensors> from;
    for (const Tensors& list : inputs) from.push_back(each(list, host));
    Tensors to = each(outputs, room);
    return staged(OpType::SCATTER, gloo_->scatter(to, from, options), to, outputs);
  }

  WorkPtr _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override {
    return reduce_rows(OpType::_REDUCE_SCATTER_BASE, host(input), output, options.reduceOp);
  }

  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) override {
    TORCH_CHECK(outputs.size() == 1 && inputs.size() == 1, "the staged group reduces one tensor at a time");
    return reduce_rows(OpType::REDUCE_SCATTER, joined(each(inputs[0], host)), outputs[0], options.reduceOp);
  }

  WorkPtr alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& to_sizes, std::vector<int64_t>& from_sizes,
                        const c10d::AllToAllOptions& options) override {
    Tensor to = room(output), from = host(input);
    return staged(OpType::ALLTOALL_BASE, gloo_->alltoall_base(to, from, to_sizes, from_sizes, options), {to}, {output});
  }

  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    std::vector<int64_t> to_sizes = sizes(outputs), from_sizes = sizes(inputs);
    Tensor to = joined(each(outputs, room)), from = joined(each(inputs, host));
    Tensors parts;
    int64_t start = 0;
    for (const Tensor& output : outputs) {
      parts.push_back(to.narrow(0, start, output.numel()).view(output.sizes()));
      start += output.numel();
    }
    return staged(OpType::ALLTOALL, gloo_->alltoall_base(to, from, to_sizes, from_sizes, options), parts, outputs);
  }

  WorkPtr send(Tensors& tensors, int peer, int tag) override {
    Tensors from = each(tensors, host);
    return staged(OpType::SEND, gloo_->send(from, peer, tag), from, {});
  }

  WorkPtr recv(Tensors& tensors, int peer, int tag) override {
    Tensors to = each(tensors, room);
    return staged(OpType::RECV, gloo_->recv(to, peer, tag), to, tensors);
  }

  WorkPtr barrier(const c10d::BarrierOptions&) override {
    return staged(OpType::BARRIER, gloo_->barrier(c10d::BarrierOptions()), {}, {});
  }

 private:
  // The work keeps `from`, which gloo reads or fills, until its end.
  WorkPtr staged(OpType type, WorkPtr work, const Tensors& from, const Tensors& to, std::function<void()> first = nullptr) {
    auto finish = [from, to, first = std::move(first)] {
      if (first) first();
      back(from, to);
    };
    return c10::make_intrusive<StagedWork>(rank_, type, std::move(work), std::move(finish), to);
  }

  WorkPtr reduce_rows(OpType type, Tensor from, const Tensor& output, const ReduceOp& op) {
    Tensor rows = at::empty({size_, output.numel()}, from.options());
    std::vector<int64_t> even;
    WorkPtr work = gloo_->alltoall_base(rows, from, even, even, c10d::AllToAllOptions());
    auto finish = [rows, output, op] { back({reduced(rows, op).to(output.scalar_type()).view(output.sizes())}, {output}); };
    return c10::make_intrusive<StagedWork>(rank_, type, std::move(work), std::move(finish), Tensors{output});
  }

  const c10::intrusive_ptr<Backend> gloo_;
};

PYBIND11_MODULE(staged_group, module) {
  module.def("over_gloo", [](const c10::intrusive_ptr<Backend>& gloo) -> c10::intrusive_ptr<Backend> {
    return c10::make_intrusive<StagedGroup>(gloo);
  });
}

}  // namespace
