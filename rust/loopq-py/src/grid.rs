//! Grids, and what has no Hessian: rounding to nearest, codes to values.

use loopq_core::grid::{self, Grid, Quantized, ScaleType, Search};
use loopq_core::{Error, Execution};
use numpy::PyArray2;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::arrays::{matrix, Codes, Matrix};
use crate::gil::{allow_threads, raise};

/// Reads a number of columns per scale; -1 and 0 both mean one scale per row.
pub(crate) fn group_size_of(group_size: i64) -> Result<usize, Error> {
    let allowed = "1 or more, or 0 / -1 for one scale per row".to_string();
    match group_size {
        -1 => Ok(0),
        other => usize::try_from(other).map_err(|_| Error::Setting {
            name: "group_size",
            got: other.to_string(),
            allowed,
        }),
    }
}

/// Reads and checks a grid.
pub(crate) fn grid_of(
    bits: u32,
    group_size: i64,
    symmetric: bool,
    scale_dtype: &str,
    search: Search,
) -> Result<Grid, Error> {
    let (group_size, scale_type) = (group_size_of(group_size)?, ScaleType::parse(scale_dtype)?);
    let grid = Grid { bits, group_size, symmetric, signed: false, scale_type, search };
    grid.check()?;
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
        dict.set_item("codes", matrix(py, grid::to_signed(out.codes, grid.bits), [rows, dim])?)?;
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
                    threads = 0))]
pub(crate) fn rtn<'py>(
    py: Python<'py>,
    w: &Bound<'py, PyAny>,
    bits: u32,
    group_size: i64,
    symmetric: bool,
    scale_dtype: &str,
    scale_search: &str,
    threads: usize,
) -> PyResult<Bound<'py, PyDict>> {
    let grid = Search::parse(scale_search)
        .and_then(|search| grid_of(bits, group_size, symmetric, scale_dtype, search))
        .map_err(|e| raise(py, &e))?;
    let w = Matrix::take("w", w)?;
    let weight = w.weight(py, "W")?;
    let out = allow_threads(py, |cancel| grid::rtn(weight, &grid, &Execution { threads, cancel }))?;
    result(py, out, &grid, weight.rows(), weight.dim())
}

#[pyfunction]
#[pyo3(signature = (codes, scales, zeros, group_size))]
pub(crate) fn dequantize<'py>(
    py: Python<'py>,
    codes: &Bound<'py, PyAny>,
    scales: &Bound<'py, PyAny>,
    zeros: Option<&Bound<'py, PyAny>>,
    group_size: i64,
) -> PyResult<Bound<'py, PyArray2<f32>>> {
    let (codes, scales) = (Codes::take(codes)?, Matrix::take("scales", scales)?);
    let zeros = zeros.map(|zeros| Matrix::take("zeros", zeros)).transpose()?;
    let [rows, dim] = codes.shape();
    let group = group_size_of(group_size).map_err(|e| raise(py, &e))?;
    let group = if group == 0 { dim.max(1) } else { group };
    let levels = [rows, dim.div_ceil(group)];
    scales.check_shape(py, "scales", levels)?;
    let scales = scales.values()?;
    let values = match (&codes, &zeros) {
        (Codes::Signed(codes), None) => {
            let codes = codes.values()?;
            allow_threads(py, |_| grid::dequantize(codes, scales, None, rows, dim, group))
        }
        (Codes::Biased(codes), Some(zeros)) => {
            zeros.check_shape(py, "zeros", levels)?;
            let (codes, zeros) = (codes.values()?, zeros.values()?);
            allow_threads(py, |_| grid::dequantize(codes, scales, Some(zeros), rows, dim, group))
        }
        (Codes::Signed(_), Some(_)) => Err(PyTypeError::new_err("signed (int8) codes take no zeros")),
        (Codes::Biased(_), None) => Err(PyTypeError::new_err("biased (uint8) codes need zeros")),
    }?;
    matrix(py, values, [rows, dim])
}
