// Methods by what they are for. The others keep the names of their papers.

/** @type {Record<string, {name: string, says: string}>} */
const NAMES = {
  reposition: { name: "Fast", says: "Moves stored passages into place and computes none of them again." },
  epic: { name: "Balanced", says: "Moves stored passages into place and reads the beginning of each again." },
  full: { name: "Exact", says: "Reads the whole prompt, as without ragcache; earlier prompts with the same beginning are reused." },
};

/** Their order where one is chosen. */
export const NAMED = Object.keys(NAMES);

/** @param {string} method @returns {string} such as "Fast" */
export const methodName = (method) => NAMES[method]?.name ?? method;

/** @param {string} method @returns {string} "" for a method without a name of its own */
export const methodSays = (method) => NAMES[method]?.says ?? "";
