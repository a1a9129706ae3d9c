// See cpu_op.h. A primitive that resolves buffers when MLX schedules it and calls its kernel on the stream's thread.
#include "cpu_op.h"

#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/c/error.h"
#include "mlx/c/private/mlx.h"
#include "mlx/primitives.h"

namespace mx = mlx::core;

namespace {

// A buffer may be taken over only if the output does not pin much more memory than it needs.
constexpr size_t kDonationSlack = 16384;

/** A copy to be made on the stream's thread before the kernel runs. */
struct Gather {
  const char* src;
  char* dst;
  mx::Shape shape;
  mx::Strides strides;
  size_t itemsize;

  void run() const {
    if (!src) {
      return;
    }
    // The longest row-contiguous tail is copied as one piece.
    size_t piece = itemsize;
    size_t dims = shape.size();
    while (dims > 0 &&
           (shape[dims - 1] == 1 ||
            strides[dims - 1] * static_cast<int64_t>(itemsize) == static_cast<int64_t>(piece))) {
      piece *= shape[dims - 1];
      dims--;
    }
    char* to = dst;
    copy(src, to, 0, dims, piece);
  }

 private:
  void copy(const char* from, char*& to, size_t dim, size_t dims, size_t piece) const {
    if (dim == dims) {
      std::memcpy(to, from, piece);
      to += piece;
      return;
    }
    for (int i = 0; i < shape[dim]; i++) {
      copy(from + i * strides[dim] * static_cast<int64_t>(itemsize), to, dim + 1, dims, piece);
    }
  }
};

class CpuOp : public mx::Primitive {
 public:
  CpuOp(
      mx::Stream stream,
      std::string name,
      std::vector<int> donors,
      lookahead_cpu_kernel kernel,
      std::shared_ptr<void> ctx)
      : mx::Primitive(stream),
        name_(std::move(name)),
        donors_(std::move(donors)),
        kernel_(kernel),
        ctx_(std::move(ctx)) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    auto& encoder = mx::cpu::get_command_encoder(stream());
    std::vector<const void*> in(inputs.size(), nullptr);
    std::vector<void*> out(outputs.size(), nullptr);
    std::vector<Gather> gathers;

    // Every output refers to the inputs, which would keep each of them from being donated. The one being evaluated is
    // enough, unless a graph transformation still reads the graph.
    for (auto& output : outputs) {
      if (&output.inputs() != &inputs && !output.is_tracer()) {
        output.inputs().clear();
      }
    }
    for (size_t o = 0; o < outputs.size(); o++) {
      auto& output = outputs[o];
      const mx::array* donor = donors_[o] < 0 ? nullptr : &inputs[donors_[o]];
      if (donor && donor->is_donatable() && donor->flags().row_contiguous &&
          donor->buffer_size() <= output.nbytes() + kDonationSlack) {
        // The shapes may differ: only the buffer and the offset are taken.
        output.copy_shared_buffer(
            *donor, output.strides(), {true, true, output.ndim() <= 1}, output.size(), 0);
      } else {
        output.set_data(mx::allocator::malloc(output.nbytes()));
        if (donor) {
          gathers.push_back(gather(*donor, output.data<char>()));
        }
      }
      encoder.set_output_array(output);
      out[o] = output.data<void>();
      if (donor) {
        in[donors_[o]] = out[o];
      }
    }
    for (size_t i = 0; i < inputs.size(); i++) {
      const auto& input = inputs[i];
      encoder.set_input_array(input);
      if (in[i]) {
        continue;
      }
      if (input.flags().row_contiguous) {
        in[i] = input.data<void>();
      } else {
        mx::array packed(input.shape(), input.dtype(), nullptr, {});
        packed.set_data(mx::allocator::malloc(input.nbytes()));
        gathers.push_back(gather(input, packed.data<char>()));
        in[i] = packed.data<void>();
        encoder.add_temporary(std::move(packed));
      }
    }
    // MLX keeps the arrays alive until the stream is past this task; the context is this task's to keep.
    encoder.dispatch([in = std::move(in),
                      out = std::move(out),
                      gathers = std::move(gathers),
                      kernel = kernel_,
                      ctx = ctx_,
                      name = name_]() {
      for (const auto& gather : gathers) {
        gather.run();
      }
      if (kernel(ctx.get(), in.data(), out.data()) != 0) {
        throw std::runtime_error("[" + name + "] the CPU kernel failed");
      }
    });
  }

  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw std::runtime_error("[" + name_ + "] has a CPU kernel only");
  }

  const char* name() const override {
    return name_.c_str();
  }

 private:
  static Gather gather(const mx::array& from, char* to) {
    if (from.size() == 0) {
      return {nullptr, to, {0}, {1}, from.itemsize()};
    }
    return {from.data<char>(), to, from.shape(), from.strides(), from.itemsize()};
  }

  std::string name_;
  std::vector<int> donors_;
  lookahead_cpu_kernel kernel_;
  std::shared_ptr<void> ctx_;
};

} // namespace

extern "C" int lookahead_cpu_op(
    mlx_vector_array* res,
    const char* name,
    const mlx_vector_array inputs,
    const lookahead_cpu_output* outputs,
    size_t num_outputs,
    lookahead_cpu_kernel kernel,
    void* ctx,
    void (*free_ctx)(void*),
    const mlx_stream s) {
  try {
    std::shared_ptr<void> owned(ctx, [free_ctx](void* ctx) {
      if (free_ctx) {
        free_ctx(ctx);
      }
    });
    std::string label = std::string("[") + name + "] ";
    const auto& in = mlx_vector_array_get_(inputs);
    auto stream = mlx_stream_get_(s);
    if (stream.device != mx::Device::cpu) {
      throw std::invalid_argument(label + "needs a CPU stream");
    }
    std::vector<mx::Shape> shapes;
    std::vector<mx::Dtype> dtypes;
    std::vector<int> donors;
    std::vector<bool> taken(in.size(), false);
    for (size_t o = 0; o < num_outputs; o++) {
      const auto& output = outputs[o];
      mx::Shape shape(output.shape, output.shape + output.ndim);
      auto dtype = mlx_dtype_to_cpp(output.dtype);
      if (output.donor >= 0) {
        size_t donor = output.donor;
        if (donor >= in.size() || taken[donor]) {
          throw std::invalid_argument(label + "an output's donor is no input or is given twice");
        }
        taken[donor] = true;
        size_t size = 1;
        for (auto dim : shape) {
          size *= dim;
        }
        if (size != in[donor].size() || dtype != in[donor].dtype()) {
          throw std::invalid_argument(label + "an output and its donor differ in size or type");
        }
      }
      shapes.push_back(std::move(shape));
      dtypes.push_back(dtype);
      donors.push_back(output.donor);
    }
    auto primitive = std::make_shared<CpuOp>(stream, name, std::move(donors), kernel, std::move(owned));
    mlx_vector_array_set_(*res, mx::array::make_arrays(std::move(shapes), dtypes, primitive, in));
    return 0;
  } catch (std::exception& e) {
    mlx_error("%s", e.what());
    return 1;
  }
}
