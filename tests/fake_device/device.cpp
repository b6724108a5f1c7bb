// A device named "fake" whose memory is that of the CPU. Its tensors are computed on the CPU, but never together with tensors of the
// CPU: like an accelerator, it refuses that. With DUALFORM_FAKE_FLOAT64=0 it has no float64, like MPS.

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <cstdlib>
#include <cstring>
#include <string>

namespace {

using at::Tensor;
using c10::SymInt;
using Sizes = c10::SymIntArrayRef;
using MaybeTensor = std::optional<Tensor>;

constexpr auto FAKE = at::DeviceType::PrivateUse1;
constexpr c10::DispatchKeySet KEYS(c10::DispatchKey::PrivateUse1);

at::IntArrayRef ints(Sizes sizes) { return C10_AS_INTARRAYREF_SLOW(sizes); }

bool is_given(const MaybeTensor& tensor) { return tensor.has_value() && tensor->defined(); }

// Memory

struct HostAllocator final : at::Allocator {
  at::DataPtr allocate(size_t bytes) override {
    void* memory = bytes ? std::malloc(bytes) : nullptr;
    return {memory, memory, &std::free, at::Device(FAKE, 0)};
  }
  at::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
};

HostAllocator allocator;
REGISTER_ALLOCATOR(FAKE, &allocator);

at::ScalarType checked(std::optional<at::ScalarType> dtype) {
  static const char* setting = std::getenv("DUALFORM_FAKE_FLOAT64");
  static const bool has_float64 = setting == nullptr || std::string(setting) != "0";
  const auto found = c10::dtype_or_default(dtype);
  TORCH_CHECK_TYPE(has_float64 || found != at::kDouble, "the fake device has no float64");
  return found;
}

Tensor empty(Sizes size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device>,
             std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(ints(size), &allocator, KEYS, checked(dtype), format);
}

Tensor empty_strided(Sizes size, Sizes stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                     std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(ints(size), ints(stride), &allocator, KEYS, checked(dtype));
}

const Tensor& resize(const Tensor& self, Sizes size, std::optional<at::MemoryFormat>) {
  self.unsafeGetTensorImpl()->set_sizes_contiguous(ints(size));
  auto* storage = self.storage().unsafeGetStorageImpl();
  const size_t needed = (self.storage_offset() + self.numel()) * self.itemsize();
  if (storage->nbytes() < needed) {
    auto memory = allocator.allocate(needed);
    if (storage->nbytes()) std::memcpy(memory.get(), storage->data(), storage->nbytes());
    storage->set_data_ptr(std::move(memory));
    storage->set_nbytes(needed);
  }
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage source) {
  auto* tensor = self.unsafeGetTensorImpl();
  const int64_t count = source.nbytes() / self.itemsize();
  tensor->set_storage_keep_dtype(std::move(source));
  tensor->set_storage_offset(0);
  tensor->set_sizes_contiguous({count});
  return self;
}

Tensor& set_part_of_storage(Tensor& self, at::Storage source, SymInt offset, Sizes size, Sizes stride) {
  auto* tensor = self.unsafeGetTensorImpl();
  tensor->set_storage_keep_dtype(std::move(source));
  tensor->set_storage_offset(offset.guard_int(__FILE__, __LINE__));
  tensor->set_sizes_and_strides(ints(size), ints(stride));
  return self;
}

// Copies

Tensor on_cpu(const Tensor& tensor) {  // the same memory
  if (tensor.is_cpu()) return tensor;
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
}

Tensor copy_from(const Tensor& self, const Tensor& to, bool) {
  on_cpu(to).copy_(on_cpu(self));
  return to;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& to) {
  to.resize_(self.sizes());
  return copy_from(self, to, false);
}

at::Scalar local_scalar(const Tensor& self) { return on_cpu(self).item(); }

// Views

Tensor as_strided(const Tensor& self, Sizes size, Sizes stride, std::optional<SymInt> offset) {
  std::optional<int64_t> begin;
  if (offset.has_value()) begin = offset->guard_int(__FILE__, __LINE__);
  return at::native::as_strided_tensorimpl(self, ints(size), ints(stride), begin);
}

Tensor view(const Tensor& self, Sizes size) { return at::native::view(self, ints(size)); }

Tensor reshape_alias(const Tensor& self, Sizes size, Sizes stride) {
  return at::native::_reshape_alias(self, ints(size), ints(stride));
}

Tensor unfold(const Tensor& self, int64_t axis, int64_t size, int64_t step) {
  return at::native::unfold(self, axis, size, step);
}

// What each accelerator computes in its own way

Tensor convolution(const Tensor& input, const Tensor& weight, const MaybeTensor& bias, Sizes stride, Sizes padding,
                   Sizes dilation, bool transposed, Sizes output_padding, SymInt groups) {
  MaybeTensor own_bias;
  if (is_given(bias)) own_bias = on_cpu(*bias);
  const Tensor found = at::convolution_symint(on_cpu(input), on_cpu(weight), own_bias, stride, padding, dilation,
                                              transposed, output_padding, groups);
  return found.to(input.device());
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(const Tensor& slope, const Tensor& input, const Tensor& weight,
                                                        Sizes stride, Sizes padding, Sizes dilation, bool transposed,
                                                        Sizes output_padding, SymInt groups,
                                                        std::array<bool, 3> wanted) {
  const std::vector<SymInt> outputs{slope.sym_size(1)};
  auto [of_input, of_weight, of_bias] =
      at::convolution_backward_symint(on_cpu(slope), on_cpu(input), on_cpu(weight), Sizes(outputs), stride, padding,
                                      dilation, transposed, output_padding, groups, wanted);
  const auto there = [&](const Tensor& one) { return one.defined() ? one.to(input.device()) : one; };
  return {there(of_input), there(of_weight), there(of_bias)};
}

// Its statistics are changed in place, which its schema does not say
std::tuple<Tensor, Tensor, Tensor> batch_norm(const Tensor& input, const MaybeTensor& weight, const MaybeTensor& bias,
                                              const MaybeTensor& mean, const MaybeTensor& variance, bool training,
                                              double momentum, double eps) {
  const auto here = [](const MaybeTensor& one) { return is_given(one) ? MaybeTensor(on_cpu(*one)) : MaybeTensor(); };
  auto [output, saved_mean, saved_scale] = at::native_batch_norm(
      on_cpu(input), here(weight), here(bias), here(mean), here(variance), training, momentum, eps);
  return {output.to(input.device()), saved_mean.to(input.device()), saved_scale.to(input.device())};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& input_gates, const Tensor& hidden_gates,
                                             const Tensor& before, const MaybeTensor& input_bias,
                                             const MaybeTensor& hidden_bias) {
  Tensor gates = input_gates + hidden_gates;
  if (is_given(input_bias)) gates = gates + *input_bias + *hidden_bias;
  const auto parts = gates.chunk(4, 1);
  const Tensor i = parts[0].sigmoid(), f = parts[1].sigmoid(), g = parts[2].tanh(), o = parts[3].sigmoid();
  const Tensor state = f * before + i * g;
  return {o * state.tanh(), state, at::cat({i, f, g, o}, 1)};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(const MaybeTensor& slope, const MaybeTensor& state_slope,
                                                      const Tensor& before, const Tensor& state, const Tensor& gates,
                                                      bool has_bias) {
  const auto parts = gates.chunk(4, 1);
  const Tensor i = parts[0], f = parts[1], g = parts[2], o = parts[3];
  const Tensor squashed = state.tanh();
  const Tensor down = is_given(slope) ? *slope : at::zeros_like(state);
  Tensor along = down * o * (1 - squashed * squashed);
  if (is_given(state_slope)) along = along + *state_slope;
  const Tensor of_gates = at::cat({along * g * i * (1 - i), along * before * f * (1 - f), along * i * (1 - g * g),
                                   down * squashed * o * (1 - o)},
                                  1);
  return {of_gates, along * f, has_bias ? of_gates.sum(0) : Tensor()};
}

// Everything else

void look(const Tensor& tensor, bool& here, bool& there) {
  if (tensor.defined() && tensor.dim() > 0) (tensor.is_cpu() ? here : there) = true;  // single numbers may be anywhere
}

void on_the_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& name = op.schema().name();
  bool here = false, there = false;
  for (const auto& value : torch::jit::last(*stack, op.schema().arguments().size())) {
    // Lists with gaps are indices, which accelerators take from the CPU, too
    if (value.isTensor()) look(value.toTensor(), here, there);
    if (value.isTensorList())
      for (const Tensor& one : value.toTensorList()) look(one, here, there);
  }
  TORCH_CHECK(!(here && there), "Expected all tensors to be on the same device, but ", name,
              " got some on cpu and some on fake");
  at::native::cpu_fallback(op, stack);
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_the_cpu>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Storage_storage_offset", &set_part_of_storage);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("unfold", &unfold);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
  m.impl("native_batch_norm", &batch_norm);
  m.impl("_thnn_fused_lstm_cell", &lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", &lstm_cell_backward);
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(conv2d, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(layer_norm, fp32)
  KERNEL_PRIVATEUSEONE(cross_entropy_loss, fp32)
}
