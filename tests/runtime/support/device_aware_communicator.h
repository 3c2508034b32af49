// A message layer that takes the memory of an emulated device, which is closed to everybody else.
#pragma once

#include <memory>

#include "kernels/cuda/emulated_device.h"
#include "runtime/exchange/communicator.h"
#include "runtime/experts.h"

namespace dsv41::testing {

class DeviceAwareCommunicator final : public Communicator {
 public:
  /// The device is looked at only while `engine` keeps messages there: loading may fail, and it is gone.
  DeviceAwareCommunicator(Communicator& inner, ExpertEngine& engine, cuda::Device& device)
      : inner_(inner), engine_(engine), device_(device) {}

  int rank() const override { return inner_.rank(); }
  int size() const override { return inner_.size(); }
  std::string host_of(int rank) const override { return inner_.host_of(rank); }
  std::string transport() const override { return inner_.transport(); }
  bool oversubscribed() const override { return inner_.oversubscribed(); }
  Request send(std::span<const std::byte> buffer, int destination, int tag) override {
    const auto access = open();
    return inner_.send(buffer, destination, tag);
  }
  Request receive(std::span<std::byte> buffer, int source, int tag) override {
    return inner_.receive(buffer, source, tag);
  }
  bool test(Request& request, std::size_t* bytes) override {
    const auto access = open();
    return inner_.test(request, bytes);
  }
  void cancel(Request& request) override { inner_.cancel(request); }
  void abort(int exit_code) override { inner_.abort(exit_code); }

 private:
  std::unique_ptr<cuda::EmulatedAccess> open() {
    return engine_.message_memory() ? std::make_unique<cuda::EmulatedAccess>(device_) : nullptr;
  }

  Communicator& inner_;
  ExpertEngine& engine_;
  cuda::Device& device_;
};

}  // namespace dsv41::testing
