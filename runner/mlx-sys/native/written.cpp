// See written.h. MLX's own identity with dependencies has the stream of its first input, and none once that is computed.
#include "written.h"

#include <exception>
#include <memory>
#include <utility>
#include <vector>

#include "mlx/c/error.h"
#include "mlx/c/private/mlx.h"
#include "mlx/primitives.h"

namespace mx = mlx::core;

namespace {

class Written : public mx::Primitive {
 public:
  explicit Written(mx::Stream stream) : mx::Primitive(stream) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    share(inputs, outputs);
  }

  void eval_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    share(inputs, outputs);
  }

  const char* name() const override {
    return "Written";
  }

 private:
  static void share(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
    for (size_t i = 0; i < outputs.size(); i++) {
      outputs[i].copy_shared_buffer(inputs[i]);
    }
  }
};

} // namespace

extern "C" int lookahead_written(
    mlx_vector_array* res,
    const mlx_vector_array buffers,
    const mlx_array writer,
    const mlx_stream s) {
  try {
    std::vector<mx::array> inputs = mlx_vector_array_get_(buffers);
    std::vector<mx::Shape> shapes;
    std::vector<mx::Dtype> dtypes;
    for (const auto& buffer : inputs) {
      shapes.push_back(buffer.shape());
      dtypes.push_back(buffer.dtype());
    }
    inputs.push_back(mlx_array_get_(writer));
    auto primitive = std::make_shared<Written>(mlx_stream_get_(s));
    mlx_vector_array_set_(*res, mx::array::make_arrays(std::move(shapes), dtypes, primitive, inputs));
    return 0;
  } catch (std::exception& error) {
    mlx_error("%s", error.what());
    return 1;
  }
}
