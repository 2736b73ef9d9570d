// A device "other" whose memory is the host's: its tensors are of another device than those of a
// CPU, so what is mixed by mistake fails here as on a GPU.  Every operator goes through CPU's.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/library.h>

#include <cstring>

using at::Tensor;

namespace {

constexpr auto kOther = c10::DeviceType::PrivateUse1;
const c10::Device device_zero(kOther, 0);

C10_REGISTER_GUARD_IMPL(PrivateUse1, c10::impl::NoOpDeviceGuardImpl<kOther>);

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* data = size ? c10::alloc_cpu(size) : nullptr;
    return {data, data, &c10::free_cpu, device_zero};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &c10::free_cpu; }
  void copy_data(void* to, const void* from, size_t size) const override {
    std::memcpy(to, from, size);
  }
};

Memory memory;
REGISTER_ALLOCATOR(kOther, &memory);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void init() const override {}
};

Hooks hooks;
const bool registered = (at::RegisterPrivateUse1HooksInterface(&hooks), true);

Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device>, std::optional<bool>,
             std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                     std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                     std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &memory,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

// The same memory as a tensor of the CPU.
Tensor on_host(const Tensor& tensor) {
  if (tensor.device().is_cpu()) return tensor;
  auto options = tensor.options().device(at::kCPU);
  if (!tensor.numel()) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), [tensor](void*) {},
                       options);
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool) {
  on_host(to).copy_(on_host(from));
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  at::native::resize_(to, from.sizes());
  return copy_from(from, to, false);
}

at::Scalar item(const Tensor& tensor) { return on_host(tensor).item(); }

const Tensor& resize(const Tensor& tensor, c10::SymIntArrayRef size,
                     std::optional<at::MemoryFormat> format) {
  return at::native::resize_(tensor, C10_AS_INTARRAYREF_SLOW(size), format);
}

Tensor& set_part(Tensor& tensor, at::Storage from, c10::SymInt offset, c10::SymIntArrayRef size,
                 c10::SymIntArrayRef stride) {
  return at::native::set_storage_cpu_(tensor, from, offset.expect_int(),
                                      C10_AS_INTARRAYREF_SLOW(size),
                                      C10_AS_INTARRAYREF_SLOW(stride));
}

Tensor& set_whole(Tensor& tensor, at::Storage from) {
  const int64_t count = from.nbytes() / tensor.dtype().itemsize();
  return at::native::set_storage_cpu_(tensor, from, 0, {count}, {});
}

// Every other operator.  A CPU's number (no dimensions) may stand beside tensors of a device.
void by_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  bool here = false, host = false;
  auto look = [&](const Tensor& tensor) {
    if (!tensor.defined()) return;
    (tensor.device().is_cpu() ? host : here) |= !tensor.device().is_cpu() || tensor.dim() > 0;
  };
  for (const auto& value : torch::jit::last(stack, op.schema().arguments().size())) {
    if (value.isTensor()) look(value.toTensor());
    if (value.isTensorList())
      for (const Tensor& tensor : value.toTensorList()) look(tensor);
    if (value.isOptionalTensorList())
      for (const std::optional<Tensor>& tensor : value.toOptionalTensorList())
        if (tensor) look(*tensor);
  }
  TORCH_CHECK(!(here && host), "tensors of two devices: ", op.operator_name());
  at::native::cpu_fallback(op, stack);
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&by_cpu>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", item);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("resize_", resize);
  m.impl("set_.source_Storage", set_whole);
  m.impl("set_.source_Storage_storage_offset", set_part);
}
