//! Arrays as the core takes them: one conversion for every argument, and one for every result.
//!
//! The core reads row-major slices. An array of the right type in another order, with strides or out of alignment is
//! copied to one; an array of another type or number of dimensions is refused with both named.
#![allow(unsafe_code)] // NumPy's own constructor, with its error

use std::any::Any;
use std::borrow::Cow;
use std::ptr::null_mut;

use half::f16;
use loopq_core::factor::Symmetric;
use loopq_core::{grid, Error, Weight};
use numpy::ndarray::Dimension;
use numpy::npyffi::{npy_intp, NpyTypes, NPY_ARRAY_WRITEABLE};
use numpy::{
    Element, Ix1, Ix2, PyArray, PyArray1, PyArray2, PyArrayDescrMethods, PyArrayMethods, PyReadonlyArray,
    PyReadwriteArray, PyUntypedArrayMethods, PY_ARRAY_API,
};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;

use crate::gil::raise;

/// A Python array, borrowed for reading, in C order and aligned.
pub(crate) struct Array<'py, T: Element, D: Dimension> {
    array: PyReadonlyArray<'py, T, D>,
}

/// A matrix argument.
pub(crate) type Matrix<'py, T> = Array<'py, T, Ix2>;
/// A vector argument.
pub(crate) type Vector<'py, T> = Array<'py, T, Ix1>;

impl<'py, T: Element, D: Dimension> Array<'py, T, D> {
    /// The array if it has the type and dimensions, in any memory order.
    fn find(given: &Bound<'py, PyAny>) -> PyResult<Option<Self>> {
        let Ok(array) = given.downcast::<PyArray<T, D>>() else {
            return Ok(None);
        };
        let array = if array.is_c_contiguous() && is_aligned(array) {
            array.clone()
        } else {
            given.call_method1("copy", ("C",))?.downcast_into::<PyArray<T, D>>()?
        };
        Ok(Some(Self { array: array.try_readonly()? }))
    }

    /// The array, or an error that names the argument, what it must be and what it is.
    pub(crate) fn take(name: &str, given: &Bound<'py, PyAny>) -> PyResult<Self> {
        let dtype = T::get_dtype(given.py());
        Self::find(given)?.ok_or_else(|| refused(name, &dtype.to_string(), D::NDIM.unwrap_or(0), given))
    }

    /// All values.
    pub(crate) fn values(&self) -> PyResult<&[T]> {
        Ok(self.array.as_slice()?)
    }
}

impl<T: Element> Matrix<'_, T> {
    /// Rows and columns.
    pub(crate) fn shape(&self) -> [usize; 2] {
        [self.array.shape()[0], self.array.shape()[1]]
    }

    /// Refuses another shape.
    pub(crate) fn check_shape(
        &self,
        py: Python<'_>,
        what: &'static str,
        expected: [usize; 2],
    ) -> PyResult<()> {
        let got = self.shape();
        if got == expected {
            return Ok(());
        }
        let text = |[rows, columns]: [usize; 2]| format!("{rows} x {columns}");
        Err(raise(py, &Error::Shape { what, expected: text(expected), got: text(got) }))
    }
}

impl Matrix<'_, f32> {
    /// The matrix as a weight; `what` names it in errors.
    pub(crate) fn weight(&self, py: Python<'_>, what: &'static str) -> PyResult<Weight<'_>> {
        let [rows, dim] = self.shape();
        Weight::new(what, self.values()?, rows, dim).map_err(|e| raise(py, &e))
    }
}

/// The error for an array of another type or another number of dimensions.
fn refused(name: &str, types: &str, n_dimensions: usize, given: &Bound<'_, PyAny>) -> PyErr {
    let got = match (given.getattr("dtype"), given.getattr("shape")) {
        (Ok(dtype), Ok(shape)) => format!("{dtype} of shape {shape}"),
        _ => given.get_type().to_string(),
    };
    PyTypeError::new_err(format!("{name} must be a {n_dimensions}-dimensional array of {types}; got {got}"))
}

/// A Hessian in either precision.
pub(crate) enum Hessian<'py> {
    F32(Matrix<'py, f32>),
    F64(Matrix<'py, f64>),
}

impl<'py> Hessian<'py> {
    pub(crate) fn take(given: &Bound<'py, PyAny>) -> PyResult<Self> {
        if let Some(h) = Array::find(given)? {
            return Ok(Self::F64(h));
        }
        if let Some(h) = Array::find(given)? {
            return Ok(Self::F32(h));
        }
        Err(refused("h", "float64 or float32", 2, given))
    }

    pub(crate) fn view(&self, py: Python<'_>) -> PyResult<Symmetric<'_>> {
        let [rows, dim] = match self {
            Self::F32(h) => h.shape(),
            Self::F64(h) => h.shape(),
        };
        if rows != dim {
            let (expected, got) = ("a square matrix".to_string(), format!("{rows} x {dim}"));
            return Err(raise(py, &Error::Shape { what: "H", expected, got }));
        }
        let view = match self {
            Self::F32(h) => Symmetric::f32(h.values()?, dim),
            Self::F64(h) => Symmetric::f64(h.values()?, dim),
        };
        view.map_err(|e| raise(py, &e))
    }

    /// The array itself, in C order, to be kept.
    pub(crate) fn unbind(self) -> Py<PyAny> {
        match self {
            Self::F32(h) => h.array.as_any().clone().unbind(),
            Self::F64(h) => h.array.as_any().clone().unbind(),
        }
    }
}

/// An array that results are written to: in C order and aligned, and borrowed by nobody else.
pub(crate) fn writable<'py, T: Element, D: Dimension>(
    given: &Bound<'py, PyAny>,
) -> Option<PyReadwriteArray<'py, T, D>> {
    let array = given.downcast::<PyArray<T, D>>().ok()?;
    array.try_readwrite().ok().filter(|out| out.is_c_contiguous() && is_aligned(array))
}

fn is_aligned<T: Element, D: Dimension>(array: &Bound<'_, PyArray<T, D>>) -> bool {
    (array.data() as usize).is_multiple_of(align_of::<T>())
}

/// Codes: signed of a symmetric grid, or biased of an asymmetric one.
pub(crate) enum Codes<'py> {
    Signed(Matrix<'py, i8>),
    Biased(Matrix<'py, u8>),
}

impl<'py> Codes<'py> {
    pub(crate) fn take(given: &Bound<'py, PyAny>) -> PyResult<Self> {
        if let Some(codes) = Array::find(given)? {
            return Ok(Self::Signed(codes));
        }
        if let Some(codes) = Array::find(given)? {
            return Ok(Self::Biased(codes));
        }
        Err(refused("codes", "int8 (signed) or uint8 (biased)", 2, given))
    }

    pub(crate) fn shape(&self) -> [usize; 2] {
        match self {
            Self::Signed(codes) => codes.shape(),
            Self::Biased(codes) => codes.shape(),
        }
    }

    /// Biased codes out of either kind; the inner error is the core's, for a code that does not fit.
    pub(crate) fn biased(&self, bits: u32, zero_offset: i64) -> PyResult<Result<Cow<'_, [u8]>, Error>> {
        let [_, dim] = self.shape();
        Ok(match self {
            Self::Signed(codes) => grid::to_biased(codes.values()?, dim, bits, zero_offset).map(Cow::Owned),
            Self::Biased(codes) => Ok(Cow::Borrowed(codes.values()?)),
        })
    }
}

/// Input rows of a Hessian.
pub(crate) enum InputRows<'py> {
    F32(Matrix<'py, f32>),
    F16(Matrix<'py, f16>),
    /// The bits of bfloat16 numbers.
    Bf16(Matrix<'py, u16>),
}

impl<'py> InputRows<'py> {
    pub(crate) fn take(given: &Bound<'py, PyAny>) -> PyResult<Self> {
        if let Some(rows) = Array::find(given)? {
            return Ok(Self::F32(rows));
        }
        if let Some(rows) = Array::find(given)? {
            return Ok(Self::Bf16(rows));
        }
        if let Some(rows) = Array::find(given)? {
            return Ok(Self::F16(rows));
        }
        Err(refused("rows", "float32, float16 or uint16 (bfloat16 bits)", 2, given))
    }

    pub(crate) fn shape(&self) -> [usize; 2] {
        match self {
            Self::F32(rows) => rows.shape(),
            Self::F16(rows) => rows.shape(),
            Self::Bf16(rows) => rows.shape(),
        }
    }
}

/// Owns the values of an array of Python.
#[pyclass(frozen)]
struct Owner {
    _values: Box<dyn Any + Send + Sync>,
}

/// A vector of results, without a copy. `PyArray1::from_vec` uses the new array before it looks whether there was memory
/// for one; here that is an error.
pub(crate) fn vector<T: Element + 'static>(
    py: Python<'_>,
    mut values: Vec<T>,
) -> PyResult<Bound<'_, PyArray1<T>>> {
    let (data, mut len, mut step) =
        (values.as_mut_ptr(), values.len() as npy_intp, size_of::<T>() as npy_intp);
    let owner = Bound::new(py, Owner { _values: Box::new(values) })?;
    // SAFETY: one dimension, whose length and step are those of the values. They stay where they are until `owner`
    // drops them, which the array keeps from here on. The type is that of an array with this data type.
    unsafe {
        let array = PY_ARRAY_API.PyArray_NewFromDescr(
            py,
            PY_ARRAY_API.get_type_object(py, NpyTypes::PyArray_Type),
            T::get_dtype(py).into_dtype_ptr(),
            1,
            &raw mut len,
            &raw mut step,
            data.cast(),
            NPY_ARRAY_WRITEABLE,
            null_mut(),
        );
        let array = Bound::from_owned_ptr_or_err(py, array)?;
        if PY_ARRAY_API.PyArray_SetBaseObject(py, array.as_ptr().cast(), owner.into_ptr()) < 0 {
            return Err(PyErr::fetch(py));
        }
        Ok(array.downcast_into_unchecked())
    }
}

/// A matrix of results.
pub(crate) fn matrix<T: Element + 'static>(
    py: Python<'_>,
    values: Vec<T>,
    shape: [usize; 2],
) -> PyResult<Bound<'_, PyArray2<T>>> {
    vector(py, values)?.reshape(shape)
}
