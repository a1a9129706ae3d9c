//! Which device the process computes on, decided once at start.
//!
//! Invariant: the answer never changes in a process's life; MLX's default device is set to match it.

use std::sync::atomic::{AtomicBool, Ordering};

use mlx_rs::{Device, DeviceType};

/// Whether the host's cores were chosen.
static ON_HOST: AtomicBool = AtomicBool::new(false);

/// Whether [`Backend::select`] has chosen the host's cores.
pub fn on_host() -> bool {
    ON_HOST.load(Ordering::Relaxed)
}

/// How the parts of a model are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Path {
    /// MLX's own operations: the reference for the other paths, and the fallback.
    Graph,
    /// Fused float32 kernels on the host's cores.
    Cpu,
    /// Fused kernels on the GPU, in the weights' own type.
    Gpu,
}

/// The kind of device that MLX computes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Backend {
    /// Float32 on the host's cores.
    Cpu,
    /// Apple silicon.
    Metal,
    /// NVIDIA.
    Cuda,
}

impl Backend {
    /// The best device that the loaded MLX library offers; `force_cpu` keeps to the host's cores.
    pub fn select(force_cpu: bool) -> Self {
        super::ops::install_error_handler();
        let mut metal = false;
        let mut cuda = false;
        // SAFETY: both calls only write the flag that they are given.
        unsafe {
            mlx_sys::mlx_metal_is_available(&mut metal);
            mlx_sys::mlx_cuda_is_available(&mut cuda);
        }
        let backend = match (force_cpu, metal, cuda) {
            (false, true, _) => Self::Metal,
            (false, false, true) => Self::Cuda,
            _ => Self::Cpu,
        };
        let device = if backend == Self::Cpu {
            DeviceType::Cpu
        } else {
            DeviceType::Gpu
        };
        ON_HOST.store(backend == Self::Cpu, Ordering::Relaxed);
        Device::set_default(&Device::new(device, 0));
        backend
    }

    /// The protocol's name for it: `cpu`, `metal` or `cuda`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Metal => "metal",
            Self::Cuda => "cuda",
        }
    }

    /// Whether weights and activations stay in the checkpoint's own type.
    pub fn is_gpu(self) -> bool {
        self != Self::Cpu
    }
}
