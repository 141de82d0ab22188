// NCCL's element types and reductions. Floating-point sums are computed in double precision and rounded once.
#pragma once
#include <math.h>
#include <string.h>
#include "settings.h"

// Source: nccl.h (2.30), ncclDataType_t and ncclRedOp_t.
enum { INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16, FLOAT8_E4M3, FLOAT8_E5M2, TYPES };
enum { SUM, PRODUCT, MAXIMUM, MINIMUM, AVERAGE, OPERATIONS };

typedef union { double f; u64 u; long long i; } number;

static u64 size_of(int type) { return (const u64[]){1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1}[type]; }
static int is_float(int type) { return type >= FLOAT16; }
static int is_signed(int type) { return type == INT8 || type == INT32 || type == INT64; }

// Bits of exponent and mantissa; E4M3 has no infinities (torch.float8_e4m3fn).
struct format { int exponent, mantissa, finite; };
static struct format format_of(int type) {
  return type == FLOAT16 ? (struct format){5, 10, 0} : type == BFLOAT16 ? (struct format){8, 7, 0}
       : type == FLOAT8_E4M3 ? (struct format){4, 3, 1} : (struct format){5, 2, 0};
}

static double decode(unsigned bits, struct format f) {
  int top = (1 << f.exponent) - 1, bias = top >> 1, e = bits >> f.mantissa & top, all = (1 << f.mantissa) - 1, m = bits & all;
  double value = e == top && !f.finite ? (m ? NAN : INFINITY) : e == top && m == all ? NAN
               : e ? ldexp(m + all + 1, e - bias - f.mantissa) : ldexp(m, 1 - bias - f.mantissa);
  return bits >> (f.exponent + f.mantissa) & 1 ? -value : value;
}

static unsigned encode(double value, struct format f) {
  unsigned top = (1u << f.exponent) - 1, all = (1u << f.mantissa) - 1, sign = signbit(value) ? 1u << (f.exponent + f.mantissa) : 0;
  unsigned infinite = top << f.mantissa | (f.finite ? all : 0);
  int bias = (int)top >> 1, e;
  if (isnan(value)) return sign | top << f.mantissa | all;
  if (isinf(value)) return sign | infinite;
  frexp(value, &e);
  e = value == 0 || e - 1 < 1 - bias ? 1 - bias : e - 1;
  if (e > bias + 1) return sign | infinite;
  unsigned bits = ((unsigned)(e + bias - 1) << f.mantissa) + (unsigned)rint(ldexp(fabs(value), f.mantissa - e));
  return sign | (bits > infinite ? infinite : bits);
}

static number load(int type, const void *from, u64 i) {
  switch (type) {
    case INT8: return (number){.i = ((const signed char *)from)[i]};
    case UINT8: return (number){.u = ((const unsigned char *)from)[i]};
    case INT32: return (number){.i = ((const int *)from)[i]};
    case UINT32: return (number){.u = ((const unsigned *)from)[i]};
    case FLOAT32: return (number){.f = ((const float *)from)[i]};
    case FLOAT16: case BFLOAT16: return (number){.f = decode(((const unsigned short *)from)[i], format_of(type))};
    case FLOAT8_E4M3: case FLOAT8_E5M2: return (number){.f = decode(((const unsigned char *)from)[i], format_of(type))};
    default: return ((const number *)from)[i];
  }
}

static void store(int type, void *to, u64 i, number value) {
  switch (type) {
    case INT8: case UINT8: ((unsigned char *)to)[i] = (unsigned char)value.u; break;
    case INT32: case UINT32: ((unsigned *)to)[i] = (unsigned)value.u; break;
    case FLOAT32: ((float *)to)[i] = (float)value.f; break;
    case FLOAT16: case BFLOAT16: ((unsigned short *)to)[i] = (unsigned short)encode(value.f, format_of(type)); break;
    case FLOAT8_E4M3: case FLOAT8_E5M2: ((unsigned char *)to)[i] = (unsigned char)encode(value.f, format_of(type)); break;
    default: ((number *)to)[i] = value;
  }
}

// A NaN is kept, as in NCCL.
static number combine(int type, int operation, number a, number b) {
  if (is_float(type)) switch (operation) {
    case PRODUCT: return (number){.f = a.f * b.f};
    case MAXIMUM: return a.f > b.f || isnan(a.f) ? a : b;
    case MINIMUM: return a.f < b.f || isnan(a.f) ? a : b;
    default: return (number){.f = a.f + b.f};
  }
  switch (operation) {
    case PRODUCT: return (number){.u = a.u * b.u};
    case MAXIMUM: return (is_signed(type) ? a.i > b.i : a.u > b.u) ? a : b;
    case MINIMUM: return (is_signed(type) ? a.i < b.i : a.u < b.u) ? a : b;
    default: return (number){.u = a.u + b.u};
  }
}

static number divide(int type, number a, int n) {
  return is_float(type) ? (number){.f = a.f / n} : is_signed(type) ? (number){.i = a.i / n} : (number){.u = a.u / n};
}

// The reduction of n equal values.
static number repeat(int type, int operation, number a, int n) {
  if (operation == SUM) return is_float(type) ? (number){.f = a.f * n} : (number){.u = a.u * n};
  if (operation != PRODUCT) return a;
  number all = a;
  for (int i = 1; i < n; i++) all = combine(type, PRODUCT, all, a);
  return all;
}

// Copy, but do not write pages that have the same content already: device memory that is never written takes no host memory.
static void put(void *to, const void *from, u64 bytes) {
  for (u64 at = 0, n; at < bytes; at += n) {
    n = bytes - at < 4096 ? bytes - at : 4096;
    if (memcmp((char *)to + at, (const char *)from + at, n)) memmove((char *)to + at, (const char *)from + at, n);
  }
}
