// Compiled code that runs where a cut is made, not in the background.  See runner.cpp.

#pragma once

#include <vector>

#include <ATen/core/Tensor.h>
#include <Python.h>

// Run a Code (lazytensor.native.Code) on these inputs, without the interpreter's lock, which is held before and after, on all
// cores or on this thread alone; whether it succeeded.
bool run_here(PyObject* code, const std::vector<at::Tensor>& inputs, std::vector<at::Tensor>& results, bool alone);
