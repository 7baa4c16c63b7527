//! Quantizers, factors, proxies and spectra.

use loopq_core::factor::{self, Symmetric};
use loopq_core::grid::{self, Grid, Quantized, ScaleType, Search};
use loopq_core::simd::Isa;
use loopq_core::solve::{self, GptqReport, Run, Scales};
use loopq_core::{Error, Watch};
use numpy::{PyArray1, PyArray2, PyReadonlyArray1, PyReadonlyArray2, PyUntypedArrayMethods};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::door::{raise, run};
use crate::hessian::matrix;

/// A Hessian array in either precision.
pub(crate) enum HArray<'py> {
    F32(PyReadonlyArray2<'py, f32>),
    F64(PyReadonlyArray2<'py, f64>),
}

impl<'py> HArray<'py> {
    pub(crate) fn take(py: Python<'py>, h: &Bound<'py, PyAny>) -> PyResult<(Self, usize)> {
        let (array, shape) = if let Ok(h) = h.extract::<PyReadonlyArray2<'py, f64>>() {
            let shape = [h.shape()[0], h.shape()[1]];
            (Self::F64(h), shape)
        } else if let Ok(h) = h.extract::<PyReadonlyArray2<'py, f32>>() {
            let shape = [h.shape()[0], h.shape()[1]];
            (Self::F32(h), shape)
        } else {
            return Err(PyTypeError::new_err("h must be a (dim, dim) array of float64 or float32"));
        };
        if shape[0] != shape[1] {
            let (expected, got) = ("a square matrix".to_string(), format!("{} x {}", shape[0], shape[1]));
            return Err(raise(py, &Error::Shape { what: "H", expected, got }));
        }
        Ok((array, shape[0]))
    }

    pub(crate) fn view(&self) -> PyResult<Symmetric<'_>> {
        Ok(match self {
            Self::F32(h) => Symmetric::F32(h.as_slice()?),
            Self::F64(h) => Symmetric::F64(h.as_slice()?),
        })
    }
}

/// Reads and checks a grid; -1 and 0 both mean one scale per row.
pub(crate) fn grid_of(
    py: Python<'_>,
    bits: u32,
    group_size: i64,
    symmetric: bool,
    scale_dtype: &str,
    scale_search: &str,
) -> PyResult<Grid> {
    let named = |e: Error| raise(py, &e);
    let allowed = "1 or more, or 0 / -1 for one scale per row".to_string();
    let group_size = match group_size {
        -1 => 0,
        other => usize::try_from(other)
            .map_err(|_| named(Error::Setting { name: "group_size", got: other.to_string(), allowed }))?,
    };
    let scale_type = ScaleType::parse(scale_dtype).map_err(named)?;
    let search = Search::parse(scale_search).map_err(named)?;
    let grid = Grid { bits, group_size, symmetric, scale_type, search };
    grid.check().map_err(named)?;
    Ok(grid)
}

/// Codes, scales and zeros as arrays: int8 signed codes of a symmetric grid, uint8 codes of an asymmetric one.
pub(crate) fn result<'py>(
    py: Python<'py>,
    out: Quantized,
    grid: &Grid,
    rows: usize,
    dim: usize,
) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    let n_groups = grid.n_groups(dim);
    if grid.symmetric {
        dict.set_item("codes", matrix(py, grid::to_signed(&out.codes, grid.bits), [rows, dim])?)?;
        dict.set_item("zeros", py.None())?;
    } else {
        dict.set_item("codes", matrix(py, out.codes, [rows, dim])?)?;
        dict.set_item("zeros", matrix(py, out.zeros, [rows, n_groups])?)?;
    }
    dict.set_item("scales", matrix(py, out.scales, [rows, n_groups])?)?;
    Ok(dict)
}

#[pyfunction]
#[pyo3(signature = (w, *, bits, group_size, symmetric = true, scale_dtype = "float32", scale_search = "max",
                    weights_diag = None, threads = 0, progress = None))]
pub(crate) fn rtn<'py>(
    py: Python<'py>,
    w: PyReadonlyArray2<'py, f32>,
    bits: u32,
    group_size: i64,
    symmetric: bool,
    scale_dtype: &str,
    scale_search: &str,
    weights_diag: Option<PyReadonlyArray1<'py, f64>>,
    threads: usize,
    progress: Option<&Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyDict>> {
    let grid = grid_of(py, bits, group_size, symmetric, scale_dtype, scale_search)?;
    let (rows, dim) = (w.shape()[0], w.shape()[1]);
    let values = w.as_slice()?;
    let weights = weights_diag.as_ref().map(PyReadonlyArray1::as_slice).transpose()?;
    let out = run(py, progress, |watch| solve::rtn(values, rows, dim, &grid, weights, threads, watch))?;
    result(py, out, &grid, rows, dim)
}

/// A factor in either precision.
enum AnyFactor {
    F32(factor::Factor<f32>),
    F64(factor::Factor<f64>),
}

macro_rules! either {
    ($self:expr, $f:ident => $body:expr) => {
        match $self {
            AnyFactor::F32($f) => $body,
            AnyFactor::F64($f) => $body,
        }
    };
}

impl AnyFactor {
    fn make(
        h: Symmetric<'_>,
        dim: usize,
        damping: f64,
        double: bool,
        act_order: bool,
        threads: usize,
        watch: &Watch,
    ) -> Result<Self, Error> {
        Ok(if double {
            Self::F64(factor::Factor::new(h, dim, damping, act_order, threads, watch)?)
        } else {
            Self::F32(factor::Factor::new(h, dim, damping, act_order, threads, watch)?)
        })
    }
}

fn is_double(py: Python<'_>, precision: &str) -> PyResult<bool> {
    match precision {
        "float64" => Ok(true),
        "float32" => Ok(false),
        other => {
            let allowed = "'float32', 'float64'".to_string();
            Err(raise(py, &Error::Setting { name: "precision", got: format!("{other:?}"), allowed }))
        }
    }
}

/// The reversed Cholesky factor of a damped Hessian, shared by layers that see the same input.
#[pyclass(frozen, module = "loopq._native")]
pub(crate) struct Factor {
    inner: AnyFactor,
    damping: f64,
    act_order: bool,
}

#[pymethods]
impl Factor {
    #[new]
    #[pyo3(signature = (h, damping, precision = "float64", *, act_order = false, threads = 0, progress = None))]
    fn new<'py>(
        py: Python<'py>,
        h: &Bound<'py, PyAny>,
        damping: f64,
        precision: &str,
        act_order: bool,
        threads: usize,
        progress: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Self> {
        let (array, dim) = HArray::take(py, h)?;
        let (view, double) = (array.view()?, is_double(py, precision)?);
        let inner = run(py, progress, |watch| {
            AnyFactor::make(view, dim, damping, double, act_order, threads, watch)
        })?;
        Ok(Self { inner, damping, act_order })
    }

    #[getter]
    fn dim(&self) -> usize {
        either!(&self.inner, f => f.dim())
    }

    #[getter]
    fn precision(&self) -> &'static str {
        match self.inner {
            AnyFactor::F32(_) => "float32",
            AnyFactor::F64(_) => "float64",
        }
    }

    #[getter]
    fn damping(&self) -> f64 {
        self.damping
    }

    #[getter]
    fn damping_abs(&self) -> f64 {
        either!(&self.inner, f => f.damping_abs)
    }

    #[getter]
    fn act_order(&self) -> bool {
        self.act_order
    }

    #[getter]
    fn n_dead_columns(&self) -> usize {
        either!(&self.inner, f => f.n_dead_columns)
    }

    #[getter]
    fn pivots<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<f64>> {
        PyArray1::from_slice(py, either!(&self.inner, f => f.pivots()))
    }
}

#[pyfunction]
#[pyo3(signature = (w, h, *, bits, group_size, damping, symmetric = true, precision = "float64",
                    scale_dtype = "float32", scales = "group", scale_search = "max", act_order = false,
                    block_size = 128, factor = None, energy = true, threads = 0, progress = None))]
pub(crate) fn gptq<'py>(
    py: Python<'py>,
    w: PyReadonlyArray2<'py, f32>,
    h: &Bound<'py, PyAny>,
    bits: u32,
    group_size: i64,
    damping: f64,
    symmetric: bool,
    precision: &str,
    scale_dtype: &str,
    scales: &str,
    scale_search: &str,
    act_order: bool,
    block_size: usize,
    factor: Option<&Bound<'py, Factor>>,
    energy: bool,
    threads: usize,
    progress: Option<&Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyDict>> {
    let named = |e: Error| raise(py, &e);
    let grid = grid_of(py, bits, group_size, symmetric, scale_dtype, scale_search)?;
    let mode = Scales::parse(scales).map_err(named)?;
    let double = is_double(py, precision)?;
    let (array, dim) = HArray::take(py, h)?;
    let (view, rows) = (array.view()?, w.shape()[0]);
    let values = w.as_slice()?;
    let shared = factor.map(Bound::get);
    if let Some(shared) = shared {
        check_shared(shared, dim, damping, precision, act_order).map_err(named)?;
    }
    let (out, report, facts, energy) = run(py, progress, |watch| {
        let made;
        let used = if let Some(shared) = shared {
            &shared.inner
        } else {
            made = AnyFactor::make(view, dim, damping, double, act_order, threads, watch)?;
            &made
        };
        let how = Run { block_size, threads, isa: Isa::best(), watch };
        let (out, report) = either!(used, f => solve::gptq(values, rows, f, &grid, mode, &how))?;
        let facts = either!(used, f => (f.damping_abs, f.n_dead_columns, f.min_pivot(), f.max_pivot(), f.order().to_vec()));
        let energy =
            if energy { Some(solve::proxy(values, None, rows, dim, view, threads, watch)?) } else { None };
        Ok((out, report, facts, energy))
    })?;
    let dict = result(py, out, &grid, rows, dim)?;
    describe(&dict, report, facts, energy)?;
    Ok(dict)
}

fn describe(
    dict: &Bound<'_, PyDict>,
    report: GptqReport,
    facts: (f64, usize, f64, f64, Vec<usize>),
    energy: Option<f64>,
) -> PyResult<()> {
    let (damping_abs, n_dead, min_pivot, max_pivot, order) = facts;
    dict.set_item("damping_abs", damping_abs)?;
    dict.set_item("n_dead_columns", n_dead)?;
    dict.set_item("min_pivot", min_pivot)?;
    dict.set_item("max_pivot", max_pivot)?;
    dict.set_item("proxy", report.proxy)?;
    dict.set_item("proxy_damped", report.proxy_damped)?;
    dict.set_item("energy", energy)?;
    dict.set_item("proxy_relative", energy.map(|e| if e > 0.0 { report.proxy / e } else { 0.0 }))?;
    if order.is_empty() {
        dict.set_item("order", dict.py().None())
    } else {
        dict.set_item("order", PyArray1::from_vec(dict.py(), order.into_iter().map(|c| c as i64).collect()))
    }
}

fn check_shared(
    shared: &Factor,
    dim: usize,
    damping: f64,
    precision: &str,
    act_order: bool,
) -> Result<(), Error> {
    let differ = |name: &'static str, got: String, made: String| {
        Err(Error::Setting { name, got, allowed: format!("{made}, which the given factor was made with") })
    };
    if shared.dim() != dim {
        return differ("the columns of h", dim.to_string(), shared.dim().to_string());
    }
    if shared.damping.to_bits() != damping.to_bits() {
        return differ("damping", damping.to_string(), shared.damping.to_string());
    }
    if shared.precision() != precision {
        return differ("precision", precision.to_string(), shared.precision().to_string());
    }
    if shared.act_order != act_order {
        return differ("act_order", act_order.to_string(), shared.act_order.to_string());
    }
    Ok(())
}

/// Codes as they come from Python: signed of a symmetric grid, or biased of an asymmetric one.
pub(crate) enum Codes<'py> {
    Signed(PyReadonlyArray2<'py, i8>),
    Biased(PyReadonlyArray2<'py, u8>),
}

impl<'py> Codes<'py> {
    pub(crate) fn take(codes: &Bound<'py, PyAny>) -> PyResult<Self> {
        if let Ok(codes) = codes.extract::<PyReadonlyArray2<'py, i8>>() {
            return Ok(Self::Signed(codes));
        }
        if let Ok(codes) = codes.extract::<PyReadonlyArray2<'py, u8>>() {
            return Ok(Self::Biased(codes));
        }
        Err(PyTypeError::new_err("codes must be a two-dimensional array of int8 (signed) or uint8 (biased)"))
    }

    pub(crate) fn shape(&self) -> [usize; 2] {
        let shape = match self {
            Self::Signed(codes) => codes.shape(),
            Self::Biased(codes) => codes.shape(),
        };
        [shape[0], shape[1]]
    }
}

#[pyfunction]
#[pyo3(signature = (codes, scales, zeros, group_size))]
pub(crate) fn dequantize<'py>(
    py: Python<'py>,
    codes: &Bound<'py, PyAny>,
    scales: PyReadonlyArray2<'py, f32>,
    zeros: Option<PyReadonlyArray2<'py, u8>>,
    group_size: i64,
) -> PyResult<Bound<'py, PyArray2<f32>>> {
    let grid = grid_of(py, 8, group_size, true, "float32", "max")?;
    let codes = Codes::take(codes)?;
    let [rows, dim] = codes.shape();
    let (scales, group) = (scales.as_slice()?, grid.group(dim));
    let zeros = zeros.as_ref().map(PyReadonlyArray2::as_slice).transpose()?;
    let values = match (&codes, zeros) {
        (Codes::Signed(codes), None) => {
            let codes = codes.as_slice()?;
            run(py, None, |_| grid::dequantize_signed(codes, scales, rows, dim, group))
        }
        (Codes::Biased(codes), Some(zeros)) => {
            let codes = codes.as_slice()?;
            run(py, None, |_| grid::dequantize(codes, scales, zeros, rows, dim, group))
        }
        (Codes::Signed(_), Some(_)) => Err(PyTypeError::new_err("signed (int8) codes take no zeros")),
        (Codes::Biased(_), None) => Err(PyTypeError::new_err("biased (uint8) codes need zeros")),
    }?;
    matrix(py, values, [rows, dim])
}

#[pyfunction]
#[pyo3(signature = (w, w_hat, h, threads = 0))]
pub(crate) fn proxy<'py>(
    py: Python<'py>,
    w: PyReadonlyArray2<'py, f32>,
    w_hat: Option<PyReadonlyArray2<'py, f32>>,
    h: &Bound<'py, PyAny>,
    threads: usize,
) -> PyResult<f64> {
    let (array, _) = HArray::take(py, h)?;
    let view = array.view()?;
    let (rows, dim) = (w.shape()[0], w.shape()[1]);
    let values = w.as_slice()?;
    let w_hat = w_hat.as_ref().map(PyReadonlyArray2::as_slice).transpose()?;
    run(py, None, |watch| solve::proxy(values, w_hat, rows, dim, view, threads, watch))
}

#[pyfunction]
#[pyo3(signature = (h, threads = 0))]
pub(crate) fn eigvalsh<'py>(
    py: Python<'py>,
    h: &Bound<'py, PyAny>,
    threads: usize,
) -> PyResult<Bound<'py, PyArray1<f64>>> {
    let (array, dim) = HArray::take(py, h)?;
    let view = array.view()?;
    Ok(PyArray1::from_vec(py, run(py, None, |watch| factor::eigvalsh(view, dim, threads, watch))?))
}
