// A message layer that takes the memory of an emulated device, which is closed to everybody else.
#pragma once

#include "kernels/cuda/emulated_device.h"
#include "runtime/exchange/communicator.h"

namespace dsv41::testing {

class DeviceAwareCommunicator final : public Communicator {
 public:
  /// Both must outlive the object.
  DeviceAwareCommunicator(Communicator& inner, cuda::Device& device) : inner_(inner), device_(device) {}

  int rank() const override { return inner_.rank(); }
  int size() const override { return inner_.size(); }
  std::string host_of(int rank) const override { return inner_.host_of(rank); }
  std::string transport() const override { return inner_.transport(); }
  bool oversubscribed() const override { return inner_.oversubscribed(); }
  Request send(std::span<const std::byte> buffer, int destination, int tag) override {
    const cuda::EmulatedAccess access(device_);
    return inner_.send(buffer, destination, tag);
  }
  Request receive(std::span<std::byte> buffer, int source, int tag) override {
    return inner_.receive(buffer, source, tag);
  }
  bool test(Request& request, std::size_t* bytes) override {
    const cuda::EmulatedAccess access(device_);
    return inner_.test(request, bytes);
  }
  void cancel(Request& request) override { inner_.cancel(request); }
  void abort(int exit_code) override { inner_.abort(exit_code); }

 private:
  Communicator& inner_;
  cuda::Device& device_;
};

}  // namespace dsv41::testing
