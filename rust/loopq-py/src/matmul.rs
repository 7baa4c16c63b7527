//! Products with packed codes.

use loopq_core::{grid, Cancel, Error, Execution};
use loopq_cpu::matmul::{self, Codes as Layer, Engine, Inputs, Layout, Outputs, Plan, Precision};
use numpy::{Ix1, Ix2, PyArray2, PyReadwriteArray};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;

use crate::arrays::{matrix, writable, Codes, InputRows, Matrix, Vector};
use crate::gil::{allow_threads, raise};
use crate::grid::Grid;

/// The instruction sets that products run with on this machine, the one in use last.
#[pyfunction]
pub(crate) fn cpu_engines() -> Vec<String> {
    Engine::available().into_iter().map(|engine| engine.name().to_string()).collect()
}

/// Reads an array `repeats` times and gives the sum of its 64-bit words.
#[pyfunction]
#[pyo3(signature = (data, repeats = 1, threads = 0))]
pub(crate) fn cpu_read(
    py: Python<'_>,
    data: &Bound<'_, PyAny>,
    repeats: usize,
    threads: usize,
) -> PyResult<u64> {
    let data: Vector<'_, u8> = Vector::take("data", data)?;
    let bytes = data.values()?;
    allow_threads(py, |cancel| matmul::read(bytes, repeats, &Execution { threads, cancel }))
}

/// Where the codes and scales of a layer lie for products on the processor.
#[pyclass(frozen, module = "loopq._native")]
pub(crate) struct CpuLayout {
    pub(crate) inner: Layout,
}

pub(crate) fn precision_of(name: &str) -> Result<Precision, Error> {
    match name {
        "int8" => Ok(Precision::Int8),
        "fixed16" => Ok(Precision::Fixed16),
        "fixed24" => Ok(Precision::Fixed24),
        _ => Err(Error::Setting {
            name: "precision",
            got: format!("{name:?}"),
            allowed: "'int8', 'fixed16', 'fixed24'".to_string(),
        }),
    }
}

enum Target<'py> {
    F32(PyReadwriteArray<'py, f32, Ix2>),
    Bf16(PyReadwriteArray<'py, u16, Ix2>),
}

impl CpuLayout {
    /// Codes as Python has them: signed on a symmetric grid.
    fn codes<'py>(&self, py: Python<'py>, codes: Vec<u8>, shape: [usize; 2]) -> PyResult<Bound<'py, PyAny>> {
        let grid = self.inner.grid();
        if grid.symmetric {
            let signed: Bound<'py, PyArray2<i8>> = matrix(py, grid::to_signed(codes, grid.bits), shape)?;
            return Ok(signed.into_any());
        }
        Ok(matrix(py, codes, shape)?.into_any())
    }
}

#[pymethods]
impl CpuLayout {
    #[new]
    #[pyo3(signature = (out_features, in_features, grid))]
    fn new(
        py: Python<'_>,
        out_features: usize,
        in_features: usize,
        grid: &Bound<'_, Grid>,
    ) -> PyResult<Self> {
        let made = Layout::new(out_features, in_features, grid.get().inner);
        Ok(Self { inner: made.map_err(|e| raise(py, &e))? })
    }

    #[getter]
    fn n_bytes(&self) -> usize {
        self.inner.n_bytes()
    }

    #[pyo3(signature = (codes, scales, out, zeros = None, threads = 0))]
    fn pack(
        &self,
        py: Python<'_>,
        codes: &Bound<'_, PyAny>,
        scales: &Bound<'_, PyAny>,
        out: &Bound<'_, PyAny>,
        zeros: Option<&Bound<'_, PyAny>>,
        threads: usize,
    ) -> PyResult<()> {
        let grid = self.inner.grid();
        let (codes, scales) = (Codes::take(codes)?, Matrix::take("scales", scales)?);
        let zeros = zeros.map(|z| Matrix::take("zeros", z)).transpose()?;
        let Some(mut out) = writable::<u8, Ix1>(out) else {
            return Err(PyTypeError::new_err("out must be a writable, contiguous array of uint8"));
        };
        let biased = codes.biased(grid.bits, 1 << (grid.bits - 1))?.map_err(|e| raise(py, &e))?;
        let zeros = zeros.as_ref().map(Matrix::values).transpose()?;
        let (layer, out) = (Layer { codes: &biased, scales: scales.values()?, zeros }, out.as_slice_mut()?);
        allow_threads(py, |cancel| matmul::pack(&self.inner, layer, out, &Execution { threads, cancel }))
    }

    #[pyo3(signature = (packed, threads = 0))]
    fn unpack<'py>(
        &self,
        py: Python<'py>,
        packed: &Bound<'py, PyAny>,
        threads: usize,
    ) -> PyResult<Bound<'py, PyAny>> {
        let packed = Vector::take("packed", packed)?;
        let packed = packed.values()?;
        let codes =
            allow_threads(py, |cancel| matmul::unpack(&self.inner, packed, &Execution { threads, cancel }))?;
        self.codes(py, codes, self.inner.shape())
    }

    fn rows<'py>(
        &self,
        py: Python<'py>,
        packed: &Bound<'py, PyAny>,
        numbers: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let packed = Vector::take("packed", packed)?;
        let numbers = Vector::<i64>::take("numbers", numbers)?;
        let (packed, numbers) = (packed.values()?, numbers.values()?);
        let codes = py.detach(|| matmul::rows(&self.inner, packed, numbers)).map_err(|e| raise(py, &e))?;
        self.codes(py, codes, [numbers.len(), self.inner.shape()[1]])
    }

    /// Calls are short, so they look for no signals.
    #[pyo3(signature = (packed, x, out, bias = None, *, precision, threads = 0))]
    fn multiply(
        &self,
        py: Python<'_>,
        packed: &Bound<'_, PyAny>,
        x: &Bound<'_, PyAny>,
        out: &Bound<'_, PyAny>,
        bias: Option<&Bound<'_, PyAny>>,
        precision: &str,
        threads: usize,
    ) -> PyResult<()> {
        let x = InputRows::take(x)?;
        let ([tokens, width], [_, inputs]) = (x.shape(), self.inner.shape());
        if width != inputs {
            let (expected, got) = (format!("(tokens, {inputs})"), format!("({tokens}, {width})"));
            return Err(raise(py, &Error::Shape { what: "x", expected, got }));
        }
        let packed = Vector::take("packed", packed)?;
        let bias = bias.map(|b| Vector::take("bias", b)).transpose()?;
        let bias = bias.as_ref().map(Vector::values).transpose()?;
        let mut target = match (writable(out), writable(out)) {
            (Some(out), _) => Target::F32(out),
            (_, Some(out)) => Target::Bf16(out),
            _ => {
                return Err(PyTypeError::new_err(
                    "out must be a writable, contiguous matrix of float32 or uint16 (bfloat16 bits)",
                ))
            }
        };
        let x = match &x {
            InputRows::F32(x) => Inputs::F32(x.values()?),
            InputRows::Bf16(x) => Inputs::Bf16(x.values()?),
            InputRows::F16(_) => {
                return Err(PyTypeError::new_err("x must be a matrix of float32 or uint16 (bfloat16 bits)"))
            }
        };
        let packed = packed.values()?;
        let out = match &mut target {
            Target::F32(out) => Outputs::F32(out.as_slice_mut()?),
            Target::Bf16(out) => Outputs::Bf16(out.as_slice_mut()?),
        };
        let done = py.detach(|| {
            let cancel = Cancel::new();
            let execution = Execution { threads, cancel: &cancel };
            let plan = Plan { precision: precision_of(precision)?, engine: Engine::best(), execution };
            matmul::multiply(&self.inner, packed, x, bias, out, &plan)
        });
        done.map_err(|e| raise(py, &e))
    }
}
