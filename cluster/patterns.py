"""What names in a cluster file look like: patterns, and words for people."""

from collections.abc import Mapping
from typing import Final

_WORD = r"[a-zA-Z0-9]([a-zA-Z0-9_.-]{0,61}[a-zA-Z0-9])?"
NAME_PATTERN: Final = r"^[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?$"
LABEL_KEY_PATTERN: Final = rf"^([a-z0-9][a-z0-9.-]{{0,251}}/)?{_WORD}$"
LABEL_VALUE_PATTERN: Final = rf"^({_WORD})?$"
BUCKET_PATTERN: Final = r"^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$"
PREFIX_PATTERN: Final = r"^[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)*$"
ENDPOINT_PATTERN: Final = r"^[A-Za-z0-9.-]+(:[0-9]{1,5})?$"
ROLE_PATTERN: Final = r"^arn:[a-z-]+:iam::[0-9]{12}:role/.+$"
URL_PATTERN: Final = r"^https?://[^\s]+$"
VARIABLE_PATTERN: Final = r"^[A-Za-z_][A-Za-z0-9_]*$"
DNS_PATTERN: Final = r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"
IMAGE_PATTERN: Final = r"^[a-z0-9._:/-]+:[A-Za-z0-9._-]+$"
AMI_PATTERN: Final = r"^ami-[0-9a-f]{8,17}$"
SUBNET_PATTERN: Final = r"^subnet-[0-9a-f]{8,17}$"
SECURITY_GROUP_PATTERN: Final = r"^sg-[0-9a-f]{8,17}$"
PROFILE_PATTERN: Final = r"^arn:[a-z-]+:iam::[0-9]{12}:instance-profile/.+$"

WORDS: Final[Mapping[str, str]] = {
    NAME_PATTERN: "1 to 32 lower-case letters, digits and dashes, no dash at either end",
    LABEL_KEY_PATTERN: "up to 63 letters, digits, dots, dashes and underscores, with a prefix/ if you like",
    LABEL_VALUE_PATTERN: "up to 63 letters, digits, dots, dashes and underscores",
    BUCKET_PATTERN: "a bucket's name: 3 to 63 lower-case letters, digits, dots and dashes",
    PREFIX_PATTERN: "letters, digits, dots, dashes and underscores, with single slashes between them",
    ENDPOINT_PATTERN: "HOST or HOST:PORT, without https://, which goes in s3.scheme",
    ROLE_PATTERN: "arn:aws:iam::ACCOUNT:role/NAME, the account having 12 digits",
    URL_PATTERN: "a URL that begins with http:// or https://",
    DNS_PATTERN: "1 to 63 lower-case letters, digits and dashes, no dash at either end",
    IMAGE_PATTERN: "an image with its tag, such as registry.example/handoff:0.1.0",
    AMI_PATTERN: "an image's id: ami- and 8 to 17 hexadecimal digits",
    SUBNET_PATTERN: "a subnet's id: subnet- and 8 to 17 hexadecimal digits",
    SECURITY_GROUP_PATTERN: "a security group's id: sg- and 8 to 17 hexadecimal digits",
    PROFILE_PATTERN: "arn:aws:iam::ACCOUNT:instance-profile/NAME, the account having 12 digits",
    VARIABLE_PATTERN: "the name of an environment variable: letters, digits and underscores",
}
